#include "tensorrt/attributes.h"

#include "names.h"
#include "state/cuda_state.h"
#include "state/require.h"
#include "state/state_config.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <iterator>
#include <string>

namespace trtllm_shadowkv::tensorrt
{
namespace
{

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// In the order of names::kATTRIBUTE_NAMES.
constexpr int32_t Attributes::* kMEMBERS[] = {&Attributes::layer, &Attributes::numHeads, &Attributes::numKvHeads,
    &Attributes::headSize, &Attributes::chunkSize, &Attributes::rank, &Attributes::topK, &Attributes::outliers};
constexpr size_t kCOUNT = std::size(kMEMBERS);
static_assert(kCOUNT == std::size(names::kATTRIBUTE_NAMES));

std::string allNames()
{
    std::string text;
    for (char const* name : names::kATTRIBUTE_NAMES)
    {
        text += (text.empty() ? "" : ", ") + std::string(name);
    }
    return text;
}

int32_t valueOf(PluginField const& field, std::string const& name)
{
    bool const is32 = field.type == PluginFieldType::kINT32;
    requireThat(is32 || field.type == PluginFieldType::kINT64,
        name + " is of plugin field type " + std::to_string(static_cast<int32_t>(field.type)), "int32 or int64");
    requireThat(field.length == 1 && field.data != nullptr,
        name + " has " + (field.data == nullptr ? "no data" : std::to_string(field.length) + " values"), "one value");
    int64_t value = 0;
    if (is32)
    {
        int32_t narrow = 0;
        std::memcpy(&narrow, field.data, sizeof(narrow));
        value = narrow;
    }
    else
    {
        std::memcpy(&value, field.data, sizeof(value));
    }
    requireRange(name.c_str(), value, INT32_MIN, INT32_MAX);
    return static_cast<int32_t>(value);
}

} // namespace

tsk_state_config opsOf(Attributes const& a, nvinfer1::DataType type)
{
    tsk_state_config ops{};
    ops.element = type == nvinfer1::DataType::kHALF ? 0 : type == nvinfer1::DataType::kBF16 ? 1 : kANY_ELEMENT;
    ops.num_layers = a.layer + 1;
    ops.num_heads = a.numHeads;
    ops.num_kv_heads = a.numKvHeads;
    ops.head_size = a.headSize;
    ops.chunk_size = a.chunkSize;
    ops.rank = a.rank;
    ops.top_k = a.topK;
    ops.outliers = a.outliers;
    return ops;
}

Attributes attributesOf(nvinfer1::PluginFieldCollection const& fields)
{
    Attributes found{};
    bool isThere[kCOUNT] = {};
    for (int32_t i = 0; i < fields.nbFields; ++i)
    {
        PluginField const& field = fields.fields[i];
        std::string const name = field.name == nullptr ? "" : field.name;
        auto const place = std::find(std::begin(names::kATTRIBUTE_NAMES), std::end(names::kATTRIBUTE_NAMES), name);
        requireThat(place != std::end(names::kATTRIBUTE_NAMES), "unknown attribute '" + name + "'", allNames());
        size_t const index = static_cast<size_t>(place - std::begin(names::kATTRIBUTE_NAMES));
        requireThat(!isThere[index], "attribute " + name + " is there twice", "each once");
        isThere[index] = true;
        found.*kMEMBERS[index] = valueOf(field, name);
    }
    for (size_t i = 0; i < kCOUNT; ++i)
    {
        requireThat(
            isThere[i], std::string("attribute ") + names::kATTRIBUTE_NAMES[i] + " is missing", "all of " + allNames());
    }
    requireRange("layer", found.layer, 0, kMAX_LAYERS - 1);
    requireOps(opsOf(found, nvinfer1::DataType::kHALF));
    return found;
}

std::vector<PluginField> fieldsOf(Attributes const* values)
{
    std::vector<PluginField> fields;
    for (size_t i = 0; i < kCOUNT; ++i)
    {
        void const* const data = values == nullptr ? nullptr : &(values->*kMEMBERS[i]);
        fields.emplace_back(names::kATTRIBUTE_NAMES[i], data, PluginFieldType::kINT32, 1);
    }
    return fields;
}

} // namespace trtllm_shadowkv::tensorrt
