#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

#include "kernels/decode/scan.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

// Advances the row by one token and gives its part of the step, all but the sums over the rows before it.
__device__ __forceinline__ StepRow advance(View const& view, int32_t slot)
{
    StepRow step{};
    step.slot = slot;
    Row row = view.rows[slot];
    row.length += 1;
    if (row.sealedRow >= 0)
    {
        if (row.sealing >= 0)
        {
            row.published = row.sealing + 1;
        }
        // One token ahead, so that the chunk is there when it leaves the window (docs/adr/0001).
        bool const due = ((row.length + 1 - view.window) >> view.chunkShift) > row.published;
        row.sealing = due ? row.published : -1;
        step.scoreItems = (row.published + kSCORE_CHUNKS - 1) / kSCORE_CHUNKS;
    }
    else
    {
        row.sealing = -1;
    }
    view.rows[slot] = row;
    step.row = row;
    step.liveTokens = row.length - (row.published << view.chunkShift);
    step.splitTokens = kSPLIT_TOKENS;
    while ((step.liveTokens + step.splitTokens - 1) / step.splitTokens > kMAX_LIVE_SPLITS)
    {
        step.splitTokens *= 2;
    }
    // The last split is up to half as long again: the window's odd tokens are no split of their own.
    step.liveSplits = max((step.liveTokens + step.splitTokens / 2 - 1) / step.splitTokens, min(step.liveTokens, 1));
    return step;
}

// One thread a batch row, one block.
__global__ void __launch_bounds__(kMAX_BATCH)
    prologueKernel(View const view, int32_t const* __restrict__ slots, int32_t batch)
{
    __shared__ uint64_t warpSums[kMAX_BATCH / 32];
    int32_t const b = static_cast<int32_t>(threadIdx.x);
    StepRow step{};
    step.slot = -1;
    step.row.sealing = -1;
    step.row.sealedRow = -1;
    if (b < batch)
    {
        int32_t const slot = slots[b];
        if (slot >= 0 && slot < view.slots)
        {
            step = advance(view, slot);
        }
        else if (slot != -1)
        {
            atomicOr(view.fault, kFAULT_SLOT);
        }
    }
    // Both sums at once; neither leaves its half: at most 2^13 items and 2^7 splits a row, 2^10 rows.
    uint64_t const work
        = uint64_t{static_cast<uint32_t>(step.scoreItems)} << 32 | static_cast<uint32_t>(step.liveSplits);
    uint64_t total;
    uint64_t const before = blockExclusiveSum(work, warpSums, total);
    if (b < batch)
    {
        step.scoreBegin = static_cast<int32_t>(before >> 32);
        step.liveBegin = static_cast<int32_t>(before & 0xffffffffU);
        view.steps[b] = step;
    }
}

} // namespace

cudaError_t stepPrologue(View const& view, int32_t const* slots, int32_t batch, cudaStream_t stream)
{
    if (batch < 1 || batch > view.maxBatch || batch > kMAX_BATCH)
    {
        return cudaErrorInvalidValue;
    }
    return launch(prologueKernel, 1, (batch + 31) / 32 * 32, 0, stream, view, slots, batch);
}

} // namespace trtllm_shadowkv::kernels
