// What the three plugins share: everything but their tensors and their work.
//
// A plugin finds the state it works on by the stream that it is enqueued on (state/bindings.h), and what kind of pass
// it is in from that state, never from shapes, which only confirm it. While TensorRT builds an engine, and times it,
// there is no state, and nothing is launched.
#pragma once

#include "NvInferRuntime.h"
#include "state/cuda_state.h"
#include "tensorrt/attributes.h"

#include <memory>
#include <string>
#include <vector>

namespace trtllm_shadowkv::tensorrt
{

// Sizes of a tensor that are not constant.
inline constexpr int64_t kTOKENS = -1; // of the pass
inline constexpr int64_t kROWS = -2;   // sequences of the pass

struct Tensor
{
    char const* name;
    bool isElement; // float16 or bfloat16, the same for all; else int32
    std::vector<int64_t> sizes;
};

// Addresses in the order of the op's tensors.
struct Work
{
    Attributes const& attributes;
    void const* const* inputs;
    void* const* outputs;
    int32_t tokens; // of the pass
    cudaStream_t stream;
};

// An op: its tensors, and what it has the state do.
struct Op
{
    char const* name;
    std::vector<Tensor> (*inputs)(Attributes const&);
    std::vector<Tensor> (*outputs)(Attributes const&);
    void (*run)(CudaState&, Work const&);
};

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuild,
               public nvinfer1::IPluginV3OneRuntime
{
public:
    Plugin(Op const& op, Attributes const& attributes, nvinfer1::TensorRTPhase phase);
    Plugin(Plugin const&) = delete;
    Plugin& operator=(Plugin const&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
        int32_t nbInputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
        nvinfer1::IExprBuilder& exprBuilder) noexcept override;
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
        int32_t nbOutputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    Tensor const& tensor(size_t place) const;
    void requireCounts(int32_t inputs, int32_t outputs) const;
    int64_t sizeOf(int64_t code, nvinfer1::PluginTensorDesc const* in) const;
    template <typename Body>
    bool succeeds(Body&& body) const noexcept;

    Op const& mOp;
    Attributes mAttributes;
    nvinfer1::TensorRTPhase mPhase;
    std::vector<Tensor> mInputs;
    std::vector<Tensor> mOutputs;
    std::vector<nvinfer1::PluginField> mFields; // of mAttributes
    nvinfer1::PluginFieldCollection mCollection;
};

class Creator : public nvinfer1::IPluginCreatorV3One
{
public:
    explicit Creator(Op const& op);

    nvinfer1::AsciiChar const* getPluginName() const noexcept override;
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override;
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;

private:
    Op const& mOp;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

} // namespace trtllm_shadowkv::tensorrt
