#include "kernels/decode/attend.cuh"
#include "kernels/decode/decode.h"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kLANE_COLUMNS = kMERGE_COLUMNS / 32;
constexpr int32_t kMERGE_LOADS = 8; // partials a lane has under way for each of its columns

// The partials of a row and head in the order in which they are added up: live, outliers, hits, misses.
struct Partials
{
    FixedPartials fixed;
    size_t live;
    int32_t outliersBegin;
    int32_t hitsBegin;
    int32_t missesBegin;
    int32_t count;
};

__device__ __forceinline__ Partials partialsOf(View const& view, StepRow const& step, int32_t row, int32_t head)
{
    int32_t const pair = row * view.kvHeads + head;
    bool const isSealed = step.row.sealedRow >= 0; // else nobody may have written the counts
    Partials partials;
    partials.fixed = fixedPartialsOf(view, row, head);
    partials.live = livePartial(view, step, head);
    partials.outliersBegin = step.liveSplits;
    partials.hitsBegin = partials.outliersBegin + (isSealed ? deviceSplits(view, step.row.outliers) : 0);
    partials.missesBegin = partials.hitsBegin + (isSealed ? deviceSplits(view, view.hitCounts[pair]) : 0);
    partials.count = partials.missesBegin + (isSealed ? deviceSplits(view, view.missCounts[pair]) : 0);
    return partials;
}

// [G, D + 2] of partial number p.
template <int32_t D>
__device__ __forceinline__ float const* partialAt(View const& view, Partials const& partials, int32_t p)
{
    size_t const index = p < partials.outliersBegin ? partials.live + p
                         : p < partials.hitsBegin   ? partials.fixed.outliers + (p - partials.outliersBegin)
                         : p < partials.missesBegin ? partials.fixed.hits + (p - partials.hitsBegin)
                                                    : partials.fixed.misses + (p - partials.missesBegin);
    return view.partials + index * (view.group * (D + 2));
}

// From L2: other blocks of this kernel may have written it.
__device__ __forceinline__ float2 loadPartial(float const* address)
{
    return __ldcg(reinterpret_cast<float2 const*>(address));
}

// What each partial counts for one query head, into weights[count]: exp(m - maximum) / sum of l exp(m - maximum), 0
// everywhere if nothing was attended. A warp's work.
template <int32_t D>
__device__ __forceinline__ void weigh(View const& view, Partials const& partials, int32_t head, float* weights)
{
    int32_t const lane = threadIdx.x % 32;
    auto const stats
        = [&](int32_t p) -> float2 { return loadPartial(partialAt<D>(view, partials, p) + head * (D + 2) + D); };
    // Most rows have no more than 32 partials: one a lane, read once.
    float2 const first = lane < partials.count ? stats(lane) : make_float2(-INFINITY, 0.0F);
    float m = first.x;
    for (int32_t p = lane + 32; p < partials.count; p += 32)
    {
        m = fmaxf(m, stats(p).x);
    }
    float const base = finiteMaximum(warpMax(m));
    auto const weight = [base](float2 s) -> float { return s.y == 0.0F ? 0.0F : powerOfTwo((s.x - base) * kLOG2_E); };
    float l = weight(first) * first.y;
    for (int32_t p = lane + 32; p < partials.count; p += 32)
    {
        float2 const s = stats(p);
        float const w = weight(s);
        weights[p] = w;
        l += w * s.y;
    }
    l = warpSum(l);
    float const inverse = l == 0.0F ? 0.0F : 1.0F / l;
    if (lane < partials.count)
    {
        weights[lane] = weight(first) * inverse;
    }
    for (int32_t p = lane + 32; p < partials.count; p += 32)
    {
        weights[p] *= inverse;
    }
}

// Merges columns [begin, end) of a row and head, a column being two elements of out [G, D]. Each warp adds up every fourth
// partial, then the four sums are added in order; no element's sum depends on which block forms it.
template <typename T, int32_t D, int32_t NT>
__device__ __forceinline__ void merge(
    View const& view, Partials const& partials, int32_t begin, int32_t end, uint32_t* out, AttendShared<D, NT>& shared)
{
    int32_t const lane = threadIdx.x % 32;
    int32_t const warp = threadIdx.x / 32;
    for (int32_t head = begin * 2 / D + warp; head <= (end - 1) * 2 / D; head += kATTEND_WARPS)
    {
        weigh<D>(view, partials, head, shared.merge.weights[head]);
    }
    __syncthreads();
    for (int32_t first = begin; first < end; first += kMERGE_COLUMNS)
    {
        int32_t heads[kLANE_COLUMNS];
        int32_t offsets[kLANE_COLUMNS];
        bool isInside[kLANE_COLUMNS];
        float2 sums[kLANE_COLUMNS];
#pragma unroll
        for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
        {
            int32_t const column = first + k * 32 + lane;
            isInside[k] = column < end;
            heads[k] = isInside[k] ? column * 2 / D : 0;
            offsets[k] = heads[k] * (D + 2) + column * 2 % D;
            sums[k] = make_float2(0.0F, 0.0F);
        }
        for (int32_t p = warp; p < partials.count; p += kMERGE_LOADS * kATTEND_WARPS)
        {
            float2 loaded[kMERGE_LOADS][kLANE_COLUMNS];
#pragma unroll
            for (int32_t a = 0; a < kMERGE_LOADS; ++a)
            {
                int32_t const index = p + a * kATTEND_WARPS;
                float const* const partial = partialAt<D>(view, partials, index);
#pragma unroll
                for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
                {
                    loaded[a][k] = index < partials.count && isInside[k] ? loadPartial(partial + offsets[k])
                                                                         : make_float2(0.0F, 0.0F);
                }
            }
#pragma unroll
            for (int32_t a = 0; a < kMERGE_LOADS; ++a)
            {
                int32_t const index = p + a * kATTEND_WARPS;
                if (index < partials.count)
                {
#pragma unroll
                    for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
                    {
                        float const weight = isInside[k] ? shared.merge.weights[heads[k]][index] : 0.0F;
                        sums[k].x += weight * loaded[a][k].x;
                        sums[k].y += weight * loaded[a][k].y;
                    }
                }
            }
        }
#pragma unroll
        for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
        {
            shared.merge.strands[warp][k * 32 + lane] = sums[k];
        }
        __syncthreads();
        int32_t const column = first + static_cast<int32_t>(threadIdx.x);
        if (column < end)
        {
            float2 sum = shared.merge.strands[0][threadIdx.x];
#pragma unroll
            for (int32_t w = 1; w < kATTEND_WARPS; ++w)
            {
                sum.x += shared.merge.strands[w][threadIdx.x].x;
                sum.y += shared.merge.strands[w][threadIdx.x].y;
            }
            out[column] = pack<T>(sum.x, sum.y);
        }
        __syncthreads();
    }
}

template <typename T, int32_t D, int32_t NT>
__global__ void __launch_bounds__(kATTEND_THREADS, kATTEND_BLOCKS)
    fetchedKernel(__grid_constant__ View const view, int32_t layer, T const* q, T* out, int32_t begin)
{
    static_assert(sizeof(AttendShared<D, NT>) <= 48 * 1024);
    __shared__ AttendShared<D, NT> shared;
    int32_t const head = blockIdx.y;
    int32_t const row = begin + static_cast<int32_t>(blockIdx.z);
    int32_t const split = blockIdx.x;
    int32_t const pair = row * view.kvHeads + head;
    int32_t const columns = view.group * D / 2;
    StepRow const& step = view.steps[row];
    auto const outputs = [&]() -> uint32_t*
    {
        size_t const index = size_t{static_cast<uint32_t>(row)} * view.heads + head * view.group;
        return reinterpret_cast<uint32_t*>(out + index * D);
    };
    if (step.slot < 0)
    {
        for (int32_t c = threadIdx.x; split == 0 && c < columns; c += kATTEND_THREADS)
        {
            outputs()[c] = 0U;
        }
        return;
    }
    bool const isSealed = step.row.sealedRow >= 0; // else nobody may have written the counts
    int32_t const splits = isSealed ? deviceSplits(view, view.missCounts[pair]) : 0;
    int32_t mergeBegin = 0;
    int32_t mergeEnd = columns;
    if (splits == 0)
    {
        // Nothing to wait for: the blocks share the merge.
        int32_t const blocks = gridDim.x;
        int32_t const width = ((columns + blocks - 1) / blocks + 31) / 32 * 32;
        mergeBegin = split * width;
        mergeEnd = min(mergeBegin + width, columns);
        if (mergeBegin >= columns)
        {
            return;
        }
    }
    else
    {
        int32_t const left = (view.missCounts[pair] << view.chunkShift) - split * kSPLIT_TOKENS;
        if (left <= 0)
        {
            return;
        }
        Span const span{Part::kMISSES, row, head, split, min(left, kSPLIT_TOKENS)};
        attendSpan<T, D, NT>(view, layer, q, span, shared);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)
        {
            // Counts to splits - 1, then 0 again: ready for the next launch.
            uint32_t const last = static_cast<uint32_t>(splits) - 1U;
            shared.isLast = atomicInc(view.arrivals + pair, last) == last;
        }
        __syncthreads();
        if (!shared.isLast)
        {
            return;
        }
        __threadfence();
    }
    Partials const partials = partialsOf(view, step, row, head);
    merge<T, D, NT>(view, partials, mergeBegin, mergeEnd, outputs(), shared);
}

} // namespace

cudaError_t attendFetched(
    View const& view, int32_t layer, void const* q, void* out, int32_t begin, int32_t end, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    return dispatchAttend(view,
        [&](auto tag, auto size, auto tiles) -> cudaError_t
        {
            using T = decltype(tag);
            auto const kernel = fetchedKernel<T, decltype(size)::value, decltype(tiles)::value>;
            dim3 const grid(static_cast<uint32_t>(splitsOf(view.topK, view)), static_cast<uint32_t>(view.kvHeads),
                static_cast<uint32_t>(end - begin));
            kernel<<<grid, kATTEND_THREADS, 0, stream>>>(
                view, layer, static_cast<T const*>(q), static_cast<T*>(out), begin);
            return cudaGetLastError();
        });
}

} // namespace trtllm_shadowkv::kernels
