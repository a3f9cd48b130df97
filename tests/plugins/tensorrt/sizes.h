// Sizes of tensors that are not known while an engine is built: TensorRT's expressions of them, as text.
#pragma once

#include "NvInfer.h"

#include <climits>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

namespace harness
{

using namespace nvinfer1;

struct SizeValue final : apiv::VDimensionExpr
{
    SizeValue(std::string words, bool known, int64_t number) : text(std::move(words)), constant(known), value(number)
    {
    }

    bool isConstant() const override
    {
        return constant;
    }

    int64_t getConstantValue() const override
    {
        return value;
    }

    bool isSizeTensor() const override
    {
        return false;
    }

    std::string text;
    bool constant;
    int64_t value;
};

struct Size final : IDimensionExpr
{
    Size(std::string text, bool constant, int64_t value) : impl(std::move(text), constant, value)
    {
        mImpl = &impl;
    }

    ~Size() noexcept override = default;

    SizeValue impl;
};

inline SizeValue const& valueOf(IDimensionExpr const& size)
{
    return static_cast<Size const&>(size).impl;
}

inline int64_t compute(DimensionOperation op, int64_t a, int64_t b)
{
    switch (op)
    {
    case DimensionOperation::kSUM:
        return a + b;
    case DimensionOperation::kPROD:
        return a * b;
    case DimensionOperation::kMAX:
        return a > b ? a : b;
    case DimensionOperation::kMIN:
        return a < b ? a : b;
    case DimensionOperation::kSUB:
        return a - b;
    case DimensionOperation::kEQUAL:
        return a == b;
    case DimensionOperation::kLESS:
        return a < b;
    case DimensionOperation::kFLOOR_DIV:
        return a / b;
    case DimensionOperation::kCEIL_DIV:
        return (a + b - 1) / b;
    }
    return INT64_MIN;
}

// Computes with numbers and writes down the rest.
struct Sizes final : IExprBuilder, apiv::VExprBuilder
{
    Sizes()
    {
        IExprBuilder::mImpl = this;
    }

    IDimensionExpr const* constant(int64_t value) override
    {
        return &all.emplace_back(std::to_string(value), true, value);
    }

    IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override
    {
        static char const* const kSIGNS[] = {"+", "*", "max", "min", "-", "==", "<", "//", "ceildiv"};
        SizeValue const& a = valueOf(first);
        SizeValue const& b = valueOf(second);
        if (a.constant && b.constant)
        {
            return constant(compute(op, a.value, b.value));
        }
        return symbol("(" + a.text + " " + kSIGNS[static_cast<int32_t>(op)] + " " + b.text + ")");
    }

    IDimensionExpr const* declareSizeTensor(int32_t index, IDimensionExpr const&, IDimensionExpr const&) override
    {
        return symbol("size" + std::to_string(index));
    }

    IDimensionExpr const* symbol(std::string const& text)
    {
        return &all.emplace_back(text, false, INT64_MIN);
    }

    std::deque<Size> all;
};

} // namespace harness
