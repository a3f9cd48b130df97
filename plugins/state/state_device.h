// What CudaState has on its device, and what its parts share; for its own sources alone.
#pragma once

#include "kernels/decode/decode.h"
#include "state/cuda_objects.h"
#include "state/cuda_state.h"
#include "state/failure.h"
#include "state/state_memory.h"

#include <cstdint>
#include <string>

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

inline constexpr uint64_t kELEMENT_ALIGNMENT = 16; // bytes: what kernels read at once
inline constexpr uint64_t kINDEX_ALIGNMENT = 4;

// A fetch has 8 blocks, which fill a PCIe gen5 link and take a multiprocessor each. Kernels that fill the GPU leave them
// as many: one that took all would hold up the next fetch until it ends, or wait itself, with a part of its work, for the
// end of a fetch.
inline constexpr int32_t kFETCH_BLOCKS = 8;

// Throws Failure that names the stage: "score of layer 3, batch rows 0 to 5: ...".
inline void checkStage(cudaError_t error, char const* stage, int32_t layer, RowGroup rows)
{
    if (error != cudaSuccess)
    {
        std::string const what = std::string(stage) + " of layer " + std::to_string(layer) + ", batch rows "
                                 + std::to_string(rows.begin) + " to " + std::to_string(rows.end - 1);
        checkCuda(error, what.c_str());
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
struct CudaState::Device
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
    OrderEvent entered; // the caller's stream has come to what is sealed or stored
    OrderEvent scored;  // the newest row group
    OrderEvent selected;
    OrderEvent fetchedMost; // all values but those of the tail
    OrderEvent fetchedAll;  // and whatever else the fetch stream has done for the caller's
};

} // namespace trtllm_shadowkv
