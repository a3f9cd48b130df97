#include "names.h"
#include "tensorrt/ops.h"

namespace trtllm_shadowkv::tensorrt
{

// The ticket has no value: it puts this op before the one that takes it.
Op const kKEY_RECONSTRUCT_OP{names::kKEY_RECONSTRUCT,
    [](Attributes const& a)
    {
        return std::vector<Tensor>{
            {"selection", false, {kROWS, a.numKvHeads, a.topK}}, {"sequence_slots", false, {kROWS}}};
    },
    [](Attributes const&) { return std::vector<Tensor>{{"ticket", false, {1}}}; },
    [](CudaState& state, Work const& work)
    {
        StepArguments arguments;
        arguments.layer = work.attributes.layer;
        arguments.batch = work.tokens;
        arguments.stream = work.stream;
        state.keyReconstruct(arguments);
    }};

} // namespace trtllm_shadowkv::tensorrt
