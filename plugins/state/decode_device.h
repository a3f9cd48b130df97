// What DecodeState has on its device; for decode_state.cpp and decode_steps.cpp alone.
#pragma once

#include "kernels/decode/decode.h"
#include "state/cuda_objects.h"
#include "state/decode_state.h"
#include "state/failure.h"
#include "state/state_memory.h"

#include <cstdint>

namespace trtllm_shadowkv
{

// Throws Failure: TSK_INVALID_ARGUMENT for a null stream in either spelling.
inline void requireStream(cudaStream_t stream)
{
    if (stream == nullptr || stream == cudaStreamLegacy)
    {
        throw Failure(TSK_INVALID_ARGUMENT,
            "stream is the null stream; expected a stream of your own (torch.cuda.Stream().cuda_stream)");
    }
}

inline int greatestPriority()
{
    int least = 0;
    int greatest = 0;
    TSK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    return greatest;
}

// Events are used by every layer and step anew; a wait is for what was recorded last.
struct DecodeState::Device
{
    // Sets the view's addresses. `maxChunks`: published chunks of a row at most.
    Device(kernels::View& view, tsk_state_config const& config, int32_t maxChunks)
        : memory(view, config.inverse_frequencies, config.max_tokens),
          selectBytes(kernels::selectSharedBytes(maxChunks)), select(greatestPriority()), fetch(greatestPriority())
    {
    }

    StateMemory memory;
    int32_t selectBytes; // the same for all rows, so that a captured graph holds as they grow
    Stream select;       // after the memory, so that it has ended before that goes
    Stream fetch;
    OrderEvent entered; // the caller's stream has come to what sealing needs
    OrderEvent scored;  // the newest row group
    OrderEvent selected;
    OrderEvent fetchedMost; // all values but those of the tail
    OrderEvent fetchedAll;  // and whatever the fetch stream did before
};

} // namespace trtllm_shadowkv
