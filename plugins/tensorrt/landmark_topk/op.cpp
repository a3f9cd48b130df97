#include "names.h"
#include "tensorrt/ops.h"

namespace trtllm_shadowkv::tensorrt
{

Op const kLANDMARK_TOPK_OP{names::kLANDMARK_TOPK,
    [](Attributes const& a)
    {
        return std::vector<Tensor>{{"qkv", true, {kTOKENS, a.qkvWidth()}}, {"position_ids", false, {kTOKENS}},
            {"sequence_slots", false, {kROWS}}};
    },
    [](Attributes const& a)
    {
        return std::vector<Tensor>{
            {"q", true, {kTOKENS, a.queryWidth()}}, {"selection", false, {kROWS, a.numKvHeads, a.topK}}};
    },
    [](CudaState& state, Work const& work)
    {
        StepArguments arguments;
        arguments.layer = work.attributes.layer;
        arguments.batch = work.tokens;
        arguments.qkv = work.inputs[0];
        arguments.positions = static_cast<int32_t const*>(work.inputs[1]);
        arguments.q = work.outputs[0];
        arguments.selection = static_cast<int32_t*>(work.outputs[1]);
        arguments.stream = work.stream;
        state.landmarkTopK(arguments);
    }};

} // namespace trtllm_shadowkv::tensorrt
