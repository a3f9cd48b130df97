#include "tensorrt/plugin.h"

#include "names.h"
#include "state/bindings.h"
#include "state/require.h"
#include "tensorrt/log.h"

#include <exception>

namespace trtllm_shadowkv::tensorrt
{
namespace
{

using namespace nvinfer1;

bool isElement(DataType type)
{
    return type == DataType::kHALF || type == DataType::kBF16;
}

std::string textOf(int64_t size)
{
    return size == kTOKENS ? "tokens" : size == kROWS ? "rows" : size < 0 ? "?" : std::to_string(size);
}

template <typename Size>
std::string textOf(int32_t count, Size const& size)
{
    std::string text = "[";
    for (int32_t i = 0; i < count; ++i)
    {
        text += (i == 0 ? "" : ", ") + textOf(size(i));
    }
    return text + "]";
}

// Throws unless sizes that are known, and constant in the op, are the op's. `size` gives -1 for one that is not known.
template <typename Size>
void requireSizes(Tensor const& tensor, int32_t count, Size const& size)
{
    int32_t const expected = static_cast<int32_t>(tensor.sizes.size());
    bool fits = count == expected;
    for (int32_t i = 0; fits && i < count; ++i)
    {
        int64_t const constant = tensor.sizes[static_cast<size_t>(i)];
        fits = constant < 0 || size(i) == -1 || size(i) == constant;
    }
    requireThat(fits, std::string(tensor.name) + " is " + textOf(count, size),
        textOf(expected, [&](int32_t i) { return tensor.sizes[static_cast<size_t>(i)]; }));
}

void requireSizes(Tensor const& tensor, Dims const& dims)
{
    requireSizes(tensor, dims.nbDims, [&](int32_t i) { return dims.d[i]; });
}

// Nothing may be thrown into TensorRT: false, and a line in its log that begins with what `where` returns.
template <typename Where, typename Body>
bool isDone(Where const& where, Body&& body) noexcept
{
    try
    {
        try
        {
            body();
            return true;
        }
        catch (std::exception const& e)
        {
            logError(where() + ": " + e.what());
        }
    }
    catch (...)
    {
        logError("a plugin of trtllm_shadowkv failed, and there is no memory to say how");
    }
    return false;
}

} // namespace

Plugin::Plugin(Op const& op, Attributes const& attributes, TensorRTPhase phase)
    : mOp(op), mAttributes(attributes), mPhase(phase), mInputs(op.inputs(attributes)), mOutputs(op.outputs(attributes)),
      mFields(fieldsOf(&mAttributes)), mCollection{static_cast<int32_t>(mFields.size()), mFields.data()}
{
}

Tensor const& Plugin::tensor(size_t place) const
{
    return place < mInputs.size() ? mInputs[place] : mOutputs[place - mInputs.size()];
}

void Plugin::requireCounts(int32_t inputs, int32_t outputs) const
{
    requireRange(
        "number of inputs", inputs, static_cast<int64_t>(mInputs.size()), static_cast<int64_t>(mInputs.size()));
    requireRange(
        "number of outputs", outputs, static_cast<int64_t>(mOutputs.size()), static_cast<int64_t>(mOutputs.size()));
}

template <typename Body>
bool Plugin::succeeds(Body&& body) const noexcept
{
    return isDone([&] { return std::string(mOp.name) + ", layer " + std::to_string(mAttributes.layer); }, body);
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kBUILD:
        return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
        return static_cast<IPluginV3OneRuntime*>(this);
    case PluginCapabilityType::kCORE:
        return static_cast<IPluginV3OneCore*>(this);
    }
    return nullptr;
}

IPluginV3* Plugin::clone() noexcept
{
    Plugin* copy = nullptr;
    succeeds([&] { copy = new Plugin(mOp, mAttributes, mPhase); });
    return copy;
}

AsciiChar const* Plugin::getPluginName() const noexcept
{
    return mOp.name;
}

AsciiChar const* Plugin::getPluginVersion() const noexcept
{
    return names::kPLUGIN_VERSION;
}

AsciiChar const* Plugin::getPluginNamespace() const noexcept
{
    return names::kDOMAIN;
}

int32_t Plugin::getNbOutputs() const noexcept
{
    return static_cast<int32_t>(mOutputs.size());
}

int32_t Plugin::getOutputDataTypes(
    DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept
{
    bool const done = succeeds(
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            for (size_t i = 0; i < mOutputs.size(); ++i)
            {
                // The ops with an element among their outputs have one as their first input.
                outputTypes[i] = mOutputs[i].isElement ? inputTypes[0] : DataType::kINT32;
            }
        });
    return done ? 0 : 1;
}

int32_t Plugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
    DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept
{
    bool const done = succeeds(
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            IDimensionExpr const* known[2] = {nullptr, nullptr}; // tokens, rows
            for (size_t i = 0; i < mInputs.size(); ++i)
            {
                DimsExprs const& dims = inputs[i];
                requireSizes(mInputs[i], dims.nbDims,
                    [&](int32_t d) { return dims.d[d]->isConstant() ? dims.d[d]->getConstantValue() : -1; });
                for (int32_t d = 0; d < dims.nbDims; ++d)
                {
                    int64_t const code = mInputs[i].sizes[static_cast<size_t>(d)];
                    if (code < 0 && known[-1 - code] == nullptr)
                    {
                        known[-1 - code] = dims.d[d];
                    }
                }
            }
            for (size_t i = 0; i < mOutputs.size(); ++i)
            {
                outputs[i].nbDims = static_cast<int32_t>(mOutputs[i].sizes.size());
                for (size_t d = 0; d < mOutputs[i].sizes.size(); ++d)
                {
                    int64_t const code = mOutputs[i].sizes[d];
                    outputs[i].d[d] = code < 0 ? known[-1 - code] : exprBuilder.constant(code);
                }
            }
        });
    return done ? 0 : 1;
}

bool Plugin::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept
{
    size_t const place = static_cast<size_t>(pos);
    if (nbInputs != static_cast<int32_t>(mInputs.size()) || nbOutputs != static_cast<int32_t>(mOutputs.size())
        || place >= mInputs.size() + mOutputs.size() || inOut[pos].desc.format != TensorFormat::kLINEAR)
    {
        return false;
    }
    DataType const type = inOut[pos].desc.type;
    if (!tensor(place).isElement)
    {
        return type == DataType::kINT32;
    }
    return isElement(type) && type == inOut[0].desc.type; // the first tensor of ops that have elements is one
}

int32_t Plugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    bool const done = succeeds(
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            for (size_t i = 0; i < mInputs.size() + mOutputs.size(); ++i)
            {
                requireSizes(tensor(i), i < mInputs.size() ? in[i].desc.dims : out[i - mInputs.size()].desc.dims);
            }
        });
    return done ? 0 : 1;
}

// Of the first input that has it; -1 where none has. Throws where they differ.
int64_t Plugin::sizeOf(int64_t code, PluginTensorDesc const* in) const
{
    int64_t found = -1;
    for (size_t i = 0; i < mInputs.size(); ++i)
    {
        for (size_t d = 0; d < mInputs[i].sizes.size(); ++d)
        {
            if (mInputs[i].sizes[d] == code)
            {
                int64_t const size = in[i].dims.d[d];
                requireThat(found == -1 || size == found,
                    std::string(mInputs[i].name) + " has " + std::to_string(size) + " " + textOf(code),
                    std::to_string(found) + ", as the inputs before it");
                found = size;
            }
        }
    }
    return found;
}

int32_t Plugin::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    bool const done = succeeds(
        [&]
        {
            requireCounts(nbInputs, nbOutputs);
            for (size_t i = 0; i < mInputs.size() + mOutputs.size(); ++i)
            {
                requireSizes(tensor(i), i < mInputs.size() ? in[i].dims : out[i - mInputs.size()].dims);
            }
            sizeOf(kTOKENS, in);
            sizeOf(kROWS, in);
        });
    return done ? 0 : 1;
}

int32_t Plugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void*, cudaStream_t stream) noexcept
{
    bool const done = succeeds(
        [&]
        {
            BoundState const bound(stream);
            CudaState* const state = bound.get();
            if (state == nullptr)
            {
                requireThat(mPhase == TensorRTPhase::kBUILD, "no state is bound to this stream",
                    "the stream that tsk_state_bind got, and an engine without auxiliary streams");
                return;
            }
            state->requireOpsOf(opsOf(mAttributes, inputDesc[0].type));
            int32_t const tokens = state->tokensOf(static_cast<int32_t>(sizeOf(kROWS, inputDesc)));
            int64_t const given = sizeOf(kTOKENS, inputDesc); // -1: the op has no input of so many
            requireThat(given == -1 || given == tokens,
                std::to_string(given) + " tokens in a pass of " + std::to_string(tokens),
                "those that begin_pass announced");
            mOp.run(*state, {mAttributes, inputs, outputs, tokens, stream});
        });
    return done ? 0 : 1;
}

IPluginV3* Plugin::attachToContext(IPluginResourceContext*) noexcept
{
    return clone();
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept
{
    return &mCollection;
}

Creator::Creator(Op const& op)
    : mOp(op), mFields(fieldsOf(nullptr)), mCollection{static_cast<int32_t>(mFields.size()), mFields.data()}
{
}

AsciiChar const* Creator::getPluginName() const noexcept
{
    return mOp.name;
}

AsciiChar const* Creator::getPluginVersion() const noexcept
{
    return names::kPLUGIN_VERSION;
}

AsciiChar const* Creator::getPluginNamespace() const noexcept
{
    return names::kDOMAIN;
}

PluginFieldCollection const* Creator::getFieldNames() noexcept
{
    return &mCollection;
}

IPluginV3* Creator::createPlugin(
    AsciiChar const* name, PluginFieldCollection const* fields, TensorRTPhase phase) noexcept
{
    Plugin* plugin = nullptr;
    isDone([&] { return std::string(mOp.name) + " '" + (name == nullptr ? "" : name) + "'"; },
        [&]
        {
            requireThat(fields != nullptr, "no attributes", "those of the op");
            plugin = new Plugin(mOp, attributesOf(*fields), phase);
        });
    return plugin;
}

} // namespace trtllm_shadowkv::tensorrt
