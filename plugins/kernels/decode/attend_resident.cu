#include "kernels/decode/attend.cuh"
#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

// Work items of batch rows [begin, end). Live splits first: only they can be long. Then split by split, over all rows
// and heads, the outliers and the hits, so that neighbouring blocks get items alike and what is short or empty comes
// last.
struct Items
{
    int32_t begin;
    int32_t end;
    int32_t liveFirst; // splits of the rows before
    int32_t live;
    int32_t pairs; // rows times KV heads
    int32_t outlierSplits;
    int32_t total;
};

__device__ __forceinline__ Items itemsOf(View const& view, int32_t begin, int32_t end)
{
    Items items;
    items.begin = begin;
    items.end = end;
    items.liveFirst = view.steps[begin].liveBegin;
    items.live = (view.steps[end - 1].liveBegin + view.steps[end - 1].liveSplits - items.liveFirst) * view.kvHeads;
    items.pairs = (end - begin) * view.kvHeads;
    items.outlierSplits = deviceSplits(view, view.outliers);
    items.total = items.live + items.pairs * (items.outlierSplits + deviceSplits(view, view.topK));
    return items;
}

// Tokens is 0 or less where there is nothing to do.
__device__ __forceinline__ Span spanOf(View const& view, Items const& items, int32_t item)
{
    Span span{Part::kLIVE, 0, 0, 0, 0};
    if (item >= items.total)
    {
        return span;
    }
    if (item < items.live)
    {
        // The last row that begins at or before it: rows without live splits begin where the next one does.
        int32_t const split = items.liveFirst + item / view.kvHeads;
        int32_t low = items.begin;
        int32_t high = items.end;
        while (high - low > 1)
        {
            int32_t const middle = (low + high) / 2;
            bool const isBefore = view.steps[middle].liveBegin <= split;
            low = isBefore ? middle : low;
            high = isBefore ? high : middle;
        }
        StepRow const& step = view.steps[low];
        span.row = low;
        span.head = item % view.kvHeads;
        span.split = split - step.liveBegin;
        int32_t const first = span.split * step.splitTokens;
        span.tokens = span.split == step.liveSplits - 1 ? step.liveTokens - first : step.splitTokens;
        return span;
    }
    int32_t const fixed = item - items.live;
    int32_t const pair = fixed % items.pairs;
    span.split = fixed / items.pairs;
    span.row = items.begin + pair / view.kvHeads;
    span.head = pair % view.kvHeads;
    StepRow const& step = view.steps[span.row];
    if (step.row.sealedRow < 0)
    {
        return span;
    }
    int32_t chunks;
    if (span.split < items.outlierSplits)
    {
        span.part = Part::kOUTLIERS;
        chunks = step.row.outliers;
    }
    else
    {
        span.part = Part::kHITS;
        span.split -= items.outlierSplits;
        chunks = view.hitCounts[span.row * view.kvHeads + span.head];
    }
    span.tokens = min((chunks << view.chunkShift) - span.split * kSPLIT_TOKENS, kSPLIT_TOKENS);
    return span;
}

template <typename T, int32_t D, int32_t NT>
__global__ void __launch_bounds__(kATTEND_THREADS, kATTEND_BLOCKS)
    residentKernel(__grid_constant__ View const view, int32_t layer, T const* q, int32_t begin, int32_t end)
{
    __shared__ AttendShared<D, NT> shared;
    __shared__ Span found[32];  // not in registers: those are short
    __shared__ uint32_t isWork; // which of them are not empty
    __shared__ bool isLast;
    int32_t const blocks = gridDim.x;
    for (int32_t first = blockIdx.x;; first += 32 * blocks)
    {
        // Each lane of one warp finds one of the block's next 32 items, so that empty ones cost next to nothing.
        __syncthreads();
        if (threadIdx.x < 32)
        {
            Items const items = itemsOf(view, begin, end);
            int32_t const lane = threadIdx.x;
            Span const span = spanOf(view, items, first + lane * blocks);
            uint32_t const mask = __ballot_sync(kFULL_WARP, span.tokens > 0);
            found[lane] = span;
            if (lane == 0)
            {
                isWork = mask;
                isLast = first + 32 * blocks >= items.total;
            }
        }
        __syncthreads();
        for (uint32_t left = isWork; left != 0U; left &= left - 1U)
        {
            Span const span = found[__ffs(static_cast<int32_t>(left)) - 1];
            attendSpan<T, D, NT>(view, layer, q, span, shared);
        }
        if (isLast)
        {
            break;
        }
    }
    afterPrevious(); // nothing here is of rebuildKeys
}

} // namespace

cudaError_t attendResident(View const& view, int32_t layer, void const* q, int32_t begin, int32_t end,
    int32_t multiprocessors, bool isAfterRebuild, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    if (multiprocessors < 1)
    {
        return cudaErrorInvalidValue;
    }
    return dispatchAttend(view,
        [&](auto tag, auto size, auto tiles) -> cudaError_t
        {
            using T = decltype(tag);
            auto const kernel = residentKernel<T, decltype(size)::value, decltype(tiles)::value>;
            int32_t blocks = 0;
            cudaError_t const error
                = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kATTEND_THREADS, 0);
            if (error != cudaSuccess)
            {
                return error;
            }
            dim3 const grid(static_cast<uint32_t>(blocks * multiprocessors));
            return launchEarly(view.startsEarly && isAfterRebuild, kernel, grid, kATTEND_THREADS, 0, stream, view,
                layer, static_cast<T const*>(q), begin, end);
        });
}

} // namespace trtllm_shadowkv::kernels
