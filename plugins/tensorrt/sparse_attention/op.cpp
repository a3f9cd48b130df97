#include "names.h"
#include "tensorrt/ops.h"

namespace trtllm_shadowkv::tensorrt
{

Op const kSPARSE_ATTENTION_OP{names::kSPARSE_ATTENTION,
    [](Attributes const& a)
    {
        return std::vector<Tensor>{{"q", true, {kTOKENS, a.queryWidth()}},
            {"selection", false, {kROWS, a.numKvHeads, a.topK}}, {"ticket", false, {1}},
            {"sequence_slots", false, {kROWS}}};
    },
    [](Attributes const& a) { return std::vector<Tensor>{{"out", true, {kTOKENS, a.queryWidth()}}}; },
    [](CudaState& state, Work const& work)
    {
        StepArguments arguments;
        arguments.layer = work.attributes.layer;
        arguments.batch = work.tokens;
        arguments.q = const_cast<void*>(work.inputs[0]); // only read
        arguments.out = work.outputs[0];
        arguments.stream = work.stream;
        state.sparseAttention(arguments);
    }};

} // namespace trtllm_shadowkv::tensorrt
