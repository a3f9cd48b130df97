#include "kernels/context/seal.cuh"
#include "kernels/decode/scan.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 1024;
constexpr int32_t kWARPS = kTHREADS / 32;
constexpr int32_t kBINS = 2048; // a thread looks at two
constexpr int32_t kCOPY_THREADS = 128;
constexpr int32_t kCOPY_WARPS = kCOPY_THREADS / 32;

struct Shared
{
    uint32_t bins[kBINS];
    uint32_t warpSums[kWARPS];
    uint32_t bin;  // the one that holds the last outlier,
    uint32_t rank; // and its rank in there, from 1
};

// Key of the rank-th lowest (from 1) of chunks 1 and up, digit by digit; `rank` becomes the rank among the chunks of
// that key.
__device__ __forceinline__ uint32_t findLimit(float const* cosines, int32_t chunks, uint32_t& rank, Shared& shared)
{
    constexpr int32_t kPASSES = 3;
    constexpr int32_t kBITS[kPASSES] = {11, 11, 10};
    uint32_t limit = 0;
    int32_t shift = 32;
#pragma unroll
    for (int32_t pass = 0; pass < kPASSES; ++pass)
    {
        int32_t const above = shift;
        shift -= kBITS[pass];
        shared.bins[threadIdx.x] = 0;
        shared.bins[threadIdx.x + kTHREADS] = 0;
        __syncthreads();
#pragma unroll 4
        for (int32_t chunk = 1 + static_cast<int32_t>(threadIdx.x); chunk < chunks; chunk += kTHREADS)
        {
            uint32_t const key = keyOf(cosines[chunk]);
            if (pass == 0 || key >> above == limit)
            {
                atomicAdd(&shared.bins[key >> shift & ((1U << kBITS[pass]) - 1U)], 1U);
            }
        }
        __syncthreads();
        uint32_t const first = shared.bins[2 * threadIdx.x];
        uint32_t const second = shared.bins[2 * threadIdx.x + 1];
        uint32_t total;
        uint32_t const before = blockExclusiveSum(first + second, shared.warpSums, total);
        if (before < rank && rank <= before + first + second) // one thread
        {
            bool const isSecond = rank > before + first;
            shared.bin = 2 * threadIdx.x + (isSecond ? 1U : 0U);
            shared.rank = rank - before - (isSecond ? first : 0U);
        }
        __syncthreads();
        limit = limit << kBITS[pass] | shared.bin;
        rank = shared.rank;
    }
    return limit;
}

// Block (KV head, layer). A warp takes neighbouring words of 32 chunks: once to count, once to write.
__global__ void __launch_bounds__(kTHREADS)
    outlierSelectKernel(__grid_constant__ View const view, Seal const seal, SealLayout const layout)
{
    __shared__ Shared shared;
    __shared__ uint32_t warpTies[kWARPS];
    int32_t const lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t const warp = static_cast<int32_t>(threadIdx.x / 32);
    int32_t const head = static_cast<int32_t>(blockIdx.x);
    int32_t const layer = seal.layerBegin + static_cast<int32_t>(blockIdx.y);
    int32_t const chunks = seal.chunks;
    float const* const cosines
        = scratchOf<float>(seal, layout, static_cast<int32_t>(blockIdx.y), layout.cosines) + int64_t{head} * chunks;

    // Below the limit all are outliers, at the limit the first `ties`.
    uint32_t limit = 0;
    uint32_t ties = seal.outliers > 1 ? static_cast<uint32_t>(seal.outliers - 1) : 0;
    if (ties > 0)
    {
        limit = findLimit(cosines, chunks, ties, shared);
    }
    int32_t const words = (chunks + 31) / 32;
    int32_t const share = (words + kWARPS - 1) / kWARPS;
    int32_t const begin = min(warp * share, words);
    int32_t const end = min(begin + share, words);
    uint32_t below = 0;
    uint32_t equal = 0;
#pragma unroll 4
    for (int32_t word = begin; word < end; ++word)
    {
        int32_t const chunk = word * 32 + lane;
        bool const isOther = chunk > 0 && chunk < chunks;
        uint32_t const key = isOther ? keyOf(cosines[chunk]) : 0;
        below += ones(__ballot_sync(kFULL_WARP, isOther && key < limit));
        equal += ones(__ballot_sync(kFULL_WARP, isOther && key == limit));
    }
    uint32_t total;
    uint32_t rank = blockExclusiveSum(lane == 0 ? below : 0, shared.warpSums, total);
    uint32_t tie = blockExclusiveSum(lane == 0 ? equal : 0, warpTies, total);
    rank = __shfl_sync(kFULL_WARP, rank, 0);
    tie = __shfl_sync(kFULL_WARP, tie, 0);
    uint32_t const hasFirst = seal.outliers > 0 ? 1 : 0; // chunk 0, in the first warp's words
    rank += min(tie, ties) + (warp > 0 ? hasFirst : 0);

    uint32_t const lower = (1U << lane) - 1U; // lanes
    int32_t* const ids
        = view.outlierIds + sealedHead(view, layer, seal.sealedRow, head) * static_cast<uint32_t>(view.outliers);
#pragma unroll 4
    for (int32_t word = begin; word < end; ++word)
    {
        int32_t const chunk = word * 32 + lane;
        bool const isOther = chunk > 0 && chunk < chunks;
        uint32_t const key = isOther ? keyOf(cosines[chunk]) : 0;
        bool const isTie = isOther && key == limit;
        uint32_t const tied = __ballot_sync(kFULL_WARP, isTie);
        uint32_t const tiesBefore = tie + ones(tied & lower);
        bool const isOutlier = chunk == 0 ? hasFirst != 0 : (isOther && key < limit) || (isTie && tiesBefore < ties);
        uint32_t const selected = __ballot_sync(kFULL_WARP, isOutlier);
        if (isOutlier)
        {
            ids[rank + ones(selected & lower)] = chunk;
        }
        if (lane == 0)
        {
            view.excluded[pagedChunk(view, layer, sealedPage(view, seal.slot, word * 32), head, word * 32) / 32]
                = selected;
        }
        rank += ones(selected);
        tie += ones(tied);
    }
}

// Grid (outliers, KV heads, layers), a warp an outlier: a chunk's keys, and its values, lie together in its page.
template <int32_t D>
__global__ void __launch_bounds__(kCOPY_THREADS) outlierCopyKernel(__grid_constant__ View const view, Seal const seal)
{
    int32_t const lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t const number = static_cast<int32_t>(blockIdx.x) * kCOPY_WARPS + static_cast<int32_t>(threadIdx.x / 32);
    int32_t const head = static_cast<int32_t>(blockIdx.y);
    int32_t const layer = seal.layerBegin + static_cast<int32_t>(blockIdx.z);
    if (number >= seal.outliers)
    {
        return;
    }
    size_t const place = sealedHead(view, layer, seal.sealedRow, head) * static_cast<uint32_t>(view.outliers)
                         + static_cast<uint32_t>(number);
    int32_t const p = view.outlierIds[place] << view.chunkShift;
    int32_t const page = livePage(view, seal.slot, view.rows[seal.slot].ring, p);
    int32_t const pieces = view.chunkSize * D / 8; // of 16 bytes
    uint4 const* const keys = reinterpret_cast<uint4 const*>(liveKey<uint16_t>(view, layer, page, head, p));
    uint4 const* const values = reinterpret_cast<uint4 const*>(liveValueUnit<uint16_t>(view, layer, page, head, p));
    uint4* const keysTo = static_cast<uint4*>(view.outlierKeys) + place * static_cast<uint32_t>(pieces);
    uint4* const valuesTo = static_cast<uint4*>(view.outlierValues) + place * static_cast<uint32_t>(pieces);
#pragma unroll 4
    for (int32_t i = lane; i < pieces; i += 32)
    {
        uint4 const key = load16(keys + i);
        uint4 const value = load16(values + i);
        keysTo[i] = key;
        valuesTo[i] = value;
    }
}

} // namespace

cudaError_t writeOutliers(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    uint32_t const heads = static_cast<uint32_t>(view.kvHeads);
    uint32_t const layers = static_cast<uint32_t>(seal.layerEnd - seal.layerBegin);
    cudaError_t const error = launch(
        outlierSelectKernel, dim3(heads, layers), kTHREADS, 0, stream, view, seal, sealLayout(view, seal.chunks));
    if (error != cudaSuccess || seal.outliers == 0)
    {
        return error;
    }
    return dispatchShape(view,
        [&](auto, auto size) -> cudaError_t
        {
            uint32_t const blocks = static_cast<uint32_t>((seal.outliers + kCOPY_WARPS - 1) / kCOPY_WARPS);
            return launch(outlierCopyKernel<decltype(size)::value>, dim3(blocks, heads, layers), kCOPY_THREADS, 0,
                stream, view, seal);
        });
}

} // namespace trtllm_shadowkv::kernels
