#include "kernels/decode/attend.cuh"
#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kWARPS = 4;
constexpr int32_t kTHREADS = kWARPS * 32;
constexpr int32_t kSTATS = (kMAX_PARTIALS + kTHREADS - 1) / kTHREADS; // a thread
constexpr int32_t kLOADS = 4;                                         // partials that a warp has under way

// The partials of a row and KV head in the order in which they are added up: live, outliers, hits, misses.
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
    Partials partials;
    int32_t const pair = row * view.kvHeads + head;
    bool const isSealed = step.row.sealedRow >= 0; // else nobody has written the counts
    partials.fixed = fixedPartialsOf(view, row, head);
    partials.live = livePartial(view, step, head);
    partials.outliersBegin = step.liveSplits;
    partials.hitsBegin = partials.outliersBegin + (isSealed ? deviceSplits(view, step.row.outliers) : 0);
    partials.missesBegin = partials.hitsBegin + (isSealed ? deviceSplits(view, view.hitCounts[pair]) : 0);
    partials.count = partials.missesBegin + (isSealed ? deviceSplits(view, view.missCounts[pair]) : 0);
    return partials;
}

// Index of partial number p.
__device__ __forceinline__ size_t partialAt(Partials const& partials, int32_t p)
{
    return p < partials.outliersBegin ? partials.live + p
           : p < partials.hitsBegin   ? partials.fixed.outliers + (p - partials.outliersBegin)
           : p < partials.missesBegin ? partials.fixed.hits + (p - partials.hitsBegin)
                                      : partials.fixed.misses + (p - partials.missesBegin);
}

// One block a query head (x) of a batch row (y). A warp adds up every fourth partial, then the four sums are added.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS) mergeKernel(__grid_constant__ View const view, T* out, int32_t begin)
{
    constexpr int32_t kCOLUMNS = D / 2; // of two elements
    constexpr int32_t kLANE_COLUMNS = (kCOLUMNS + 31) / 32;
    __shared__ float weights[kMAX_PARTIALS];
    __shared__ float reduced[2][kWARPS];
    __shared__ float2 strands[kWARPS][kCOLUMNS];
    int32_t const lane = threadIdx.x % 32;
    int32_t const warp = threadIdx.x / 32;
    int32_t const row = begin + static_cast<int32_t>(blockIdx.y);
    int32_t const queryHead = blockIdx.x;
    StepRow const& step = view.steps[row];
    afterPrevious();
    uint32_t* const to
        = reinterpret_cast<uint32_t*>(out + (size_t{static_cast<uint32_t>(row)} * view.heads + queryHead) * D);
    if (step.slot < 0)
    {
        for (int32_t c = threadIdx.x; c < kCOLUMNS; c += kTHREADS)
        {
            to[c] = 0U;
        }
        return;
    }
    Partials const partials = partialsOf(view, step, row, queryHead / view.group);
    float const* const base = view.partials + queryHead % view.group * (D + 2);
    int32_t const stride = view.group * (D + 2);

    // Weight of each partial: exp(m - maximum) / sum of l exp(m - maximum); 0 where nothing was attended.
    float2 stats[kSTATS];
    float m = -INFINITY;
#pragma unroll
    for (int32_t k = 0; k < kSTATS; ++k)
    {
        int32_t const p = k * kTHREADS + static_cast<int32_t>(threadIdx.x);
        stats[k] = make_float2(-INFINITY, 0.0F);
        if (p < partials.count)
        {
            stats[k] = *reinterpret_cast<float2 const*>(base + partialAt(partials, p) * stride + D);
        }
        m = fmaxf(m, stats[k].x);
    }
    m = warpMax(m);
    if (lane == 0)
    {
        reduced[0][warp] = m;
    }
    __syncthreads();
    m = finiteMaximum(fmaxf(fmaxf(reduced[0][0], reduced[0][1]), fmaxf(reduced[0][2], reduced[0][3])));
    float sum = 0.0F;
#pragma unroll
    for (int32_t k = 0; k < kSTATS; ++k)
    {
        int32_t const p = k * kTHREADS + static_cast<int32_t>(threadIdx.x);
        float const weight = stats[k].y == 0.0F ? 0.0F : powerOfTwo((stats[k].x - m) * kLOG2_E);
        sum += weight * stats[k].y;
        if (p < partials.count)
        {
            weights[p] = weight;
        }
    }
    sum = warpSum(sum);
    if (lane == 0)
    {
        reduced[1][warp] = sum;
    }
    __syncthreads();
    sum = (reduced[1][0] + reduced[1][1]) + (reduced[1][2] + reduced[1][3]);
    float const inverse = sum == 0.0F ? 0.0F : 1.0F / sum;

    float2 sums[kLANE_COLUMNS] = {};
    for (int32_t first = warp; first < partials.count; first += kLOADS * kWARPS)
    {
        float2 loaded[kLOADS][kLANE_COLUMNS];
#pragma unroll
        for (int32_t a = 0; a < kLOADS; ++a)
        {
            int32_t const p = first + a * kWARPS;
            float2 const* const from
                = reinterpret_cast<float2 const*>(base + partialAt(partials, min(p, partials.count - 1)) * stride);
#pragma unroll
            for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
            {
                int32_t const column = k * 32 + lane;
                bool const isInside = p < partials.count && column < kCOLUMNS;
                loaded[a][k] = isInside ? from[column] : make_float2(0.0F, 0.0F);
            }
        }
#pragma unroll
        for (int32_t a = 0; a < kLOADS; ++a)
        {
            int32_t const p = first + a * kWARPS;
            float const weight = p < partials.count ? weights[p] : 0.0F;
#pragma unroll
            for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
            {
                sums[k].x += weight * loaded[a][k].x;
                sums[k].y += weight * loaded[a][k].y;
            }
        }
    }
#pragma unroll
    for (int32_t k = 0; k < kLANE_COLUMNS; ++k)
    {
        if (k * 32 + lane < kCOLUMNS)
        {
            strands[warp][k * 32 + lane] = sums[k];
        }
    }
    __syncthreads();
    for (int32_t c = threadIdx.x; c < kCOLUMNS; c += kTHREADS)
    {
        float2 total = strands[0][c];
#pragma unroll
        for (int32_t w = 1; w < kWARPS; ++w)
        {
            total.x += strands[w][c].x;
            total.y += strands[w][c].y;
        }
        to[c] = pack<T>(total.x * inverse, total.y * inverse);
    }
}

} // namespace

cudaError_t mergePartials(View const& view, void* out, int32_t begin, int32_t end, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            dim3 const grid(static_cast<uint32_t>(view.heads), static_cast<uint32_t>(end - begin));
            auto const kernel = mergeKernel<T, decltype(size)::value>;
            return launchEarly(view.startsEarly, kernel, grid, kTHREADS, 0, stream, view, static_cast<T*>(out), begin);
        });
}

} // namespace trtllm_shadowkv::kernels
