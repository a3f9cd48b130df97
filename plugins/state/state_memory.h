// The device memory of a state.
#pragma once

#include "kernels/decode/view.h"
#include "state/cuda_objects.h"

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>

namespace trtllm_shadowkv
{

// Bytes of the three blocks that all arrays of a view lie in.
struct StateBytes
{
    size_t kept;    // the books of rows, tables, counters: never poisoned, zero at first
    size_t pools;   // what rows own
    size_t scratch; // what one layer of a step, or a seal, writes before it reads it

    uint64_t total() const noexcept
    {
        return uint64_t{kept} + pools + scratch;
    }
};

// Throws Failure: TSK_INVALID_ARGUMENT where an array is larger than any machine's memory.
StateBytes bytesOf(kernels::View const& sizes, int32_t maxTokens);

class StateMemory
{
public:
    // Takes what the view's sizes ask for, sets its addresses, zeroes what is kept and counts of hits and misses, and
    // fills the RoPE tables. Waits for the device. `inverseFrequencies`: host [D / 2].
    // Throws Failure: TSK_INVALID_ARGUMENT, TSK_CUDA_ERROR.
    StateMemory(kernels::View& view, float const* inverseFrequencies, int32_t maxTokens);

    // Fills the pools (where `pools`) and scratch memory with bytes 0xff. Throws Failure: TSK_CUDA_ERROR.
    void poison(kernels::View const& view, bool pools, cudaStream_t stream) const;

    // A step's scratch memory, which a seal may use between steps: enough for one layer of the longest row at least.
    void* scratch() const noexcept
    {
        return mScratch->data();
    }

    size_t scratchBytes() const noexcept
    {
        return mScratch->bytes();
    }

private:
    using Block = std::unique_ptr<DeviceArray<std::byte>>;

    Block mKept;
    Block mPools;
    Block mScratch;
};

} // namespace trtllm_shadowkv
