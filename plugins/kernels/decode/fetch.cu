#include "kernels/decode/decode.h"

#include "kernels/decode/device.cuh"
#include "kernels/decode/scan.cuh"
#include "kernels/launch.cuh"
#include "kernels/ptx.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

// With 64 registers a thread a block has a multiprocessor for itself: beside others on the same one it is slower.
constexpr uint32_t kTHREADS = 1024;
constexpr uint32_t kLOADS = 8; // 16-byte loads a lane keeps in flight, see gather.cu
constexpr uint32_t kTILE = 32 * kLOADS;
constexpr uint32_t kPIECE = 16;      // bytes of a load
constexpr uint32_t kONE = 1U << 20;  // 1 in fixed point
constexpr uint32_t kTILE_CHUNKS = 9; // chunks of 512 bytes or more of which a tile of 4 KiB may hold a part
// Pairs of batch row and KV head whose misses are one list; more pairs than that follow in further rounds.
constexpr uint32_t kPAIRS = 2 * kTHREADS;

struct Pairs
{
    uint32_t begins[kPAIRS]; // misses of the pairs before; an empty pair begins where the next one does
    uint32_t firstEntries[kPAIRS];
    uint32_t cacheHeads[kPAIRS]; // sealedHead()
    uint64_t regions[kPAIRS];    // address of the head's chunk 0
};

// Fills `pairs` with where the values of `count` pairs from `first` on (index b * H + h) are and go. A pair of a dense
// row or of padding gets region 0.
__device__ __forceinline__ void findPairs(
    View const& view, int32_t layer, uint32_t first, uint32_t count, uint32_t bytes, Pairs& pairs)
{
    for (uint32_t i = threadIdx.x; i < count; i += kTHREADS)
    {
        uint32_t const pair = first + i;
        uint32_t const kvHeads = static_cast<uint32_t>(view.kvHeads);
        uint32_t const head = pair % kvHeads;
        StepRow const& step = view.steps[pair / kvHeads];
        uint64_t region = 0;
        if (step.row.sealedRow >= 0)
        {
            pairs.cacheHeads[i]
                = static_cast<uint32_t>(sealedHead(view, layer, step.row.sealedRow, static_cast<int32_t>(head)));
            region = view.valueRegion[size_t{static_cast<uint32_t>(step.slot)} * view.layers + layer]
                     + uint64_t{head} * static_cast<uint32_t>(step.row.valueStride) * bytes;
        }
        pairs.regions[i] = region;
    }
}

// Lists the misses of the pairs that findPairs found, a barrier before, and returns how many they are.
__device__ __forceinline__ uint32_t listMisses(
    View const& view, uint32_t first, uint32_t count, Pairs& pairs, uint32_t* warpSums)
{
    uint32_t misses[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
    {
        uint32_t const i = threadIdx.x * 2 + j;
        misses[j] = 0;
        if (i < count && pairs.regions[i] != 0)
        {
            uint32_t const pair = first + i;
            misses[j] = static_cast<uint32_t>(view.missCounts[pair]);
            pairs.firstEntries[i]
                = pair * static_cast<uint32_t>(view.topK) + static_cast<uint32_t>(view.hitCounts[pair]);
        }
    }
    uint32_t total;
    uint32_t const before = blockExclusiveSum(misses[0] + misses[1], warpSums, total);
    pairs.begins[threadIdx.x * 2] = before;
    pairs.begins[threadIdx.x * 2 + 1] = before + misses[0];
    __syncthreads();
    return total;
}

// The pair of miss `miss`, which is below the total: the last one that begins at or before it.
__device__ __forceinline__ uint32_t pairOf(Pairs const& pairs, uint32_t miss)
{
    uint32_t pair = 0;
#pragma unroll
    for (uint32_t step = kPAIRS / 2; step > 0; step /= 2)
    {
        pair += pairs.begins[pair + step] <= miss ? step : 0;
    }
    return pair;
}

// Address of a piece, counted from the start of the first of `chunks`. `reciprocal` is kONE / piecesPerChunk rounded
// up: exact for a piece below 512.
__device__ __forceinline__ uint64_t addressOf(
    uint64_t const* chunks, uint32_t piece, uint32_t piecesPerChunk, uint32_t reciprocal)
{
    uint32_t const chunk = piece * reciprocal / kONE;
    return chunks[chunk] + (piece - chunk * piecesPerChunk) * kPIECE;
}

// All missing chunks in a row are one sequence of 16-byte pieces. A warp copies kTILE of them at a time, and the warps
// of the grid take neighbouring tiles: all reads of a moment lie close together, which the link needs for small chunks.
__global__ void __launch_bounds__(kTHREADS, 1) fetchKernel(View const view, int32_t layer, uint32_t firstPair,
    uint32_t pairCount, uint32_t piecesPerChunk, uint32_t reciprocal)
{
    __shared__ Pairs pairs;
    __shared__ uint32_t warpSums[kTHREADS / 32];
    __shared__ uint64_t sources[kTHREADS / 32][kTILE_CHUNKS];
    __shared__ uint64_t targets[kTHREADS / 32][kTILE_CHUNKS];
    uint32_t const lane = threadIdx.x % 32;
    uint32_t const warp = threadIdx.x / 32;
    uint32_t const warps = gridDim.x * (kTHREADS / 32);
    uint32_t const bytes = piecesPerChunk * kPIECE;
    for (uint32_t base = 0; base < pairCount; base += kPAIRS)
    {
        uint32_t const count = min(pairCount - base, kPAIRS);
        __syncthreads(); // all are done with the round before
        findPairs(view, layer, firstPair + base, count, bytes, pairs);
        __syncthreads();
        afterPrevious();
        uint32_t const chunks = listMisses(view, firstPair + base, count, pairs, warpSums);
        uint32_t const pieces = chunks * piecesPerChunk; // at most 2^10 pairs * 2^11 chunks * 2^8
        uint32_t const tiles = (pieces + kTILE - 1) / kTILE;
        for (uint32_t tile = blockIdx.x * (kTHREADS / 32) + warp; tile < tiles; tile += warps)
        {
            if (tile + warps >= tiles)
            {
                letNextStart(); // the next fetch takes its multiprocessors before anything else does
            }
            uint32_t const first = tile * kTILE;
            uint32_t const firstChunk = first / piecesPerChunk;
            uint32_t const lastChunk = (min(first + kTILE, pieces) - 1) / piecesPerChunk;
            uint32_t const chunk = firstChunk + lane; // lane i looks up the tile's i-th chunk
            __syncwarp();                             // all are done with the addresses of the tile before
            if (chunk <= lastChunk)
            {
                uint32_t const pair = pairOf(pairs, chunk);
                Entry const entry = view.entries[pairs.firstEntries[pair] + (chunk - pairs.begins[pair])];
                sources[warp][lane] = pairs.regions[pair] + uint64_t{static_cast<uint32_t>(entry.chunk)} * bytes;
                uint64_t const slot = uint64_t{pairs.cacheHeads[pair]} * static_cast<uint32_t>(view.cacheSlots)
                                      + static_cast<uint32_t>(entry.slot);
                targets[warp][lane] = reinterpret_cast<uint64_t>(view.cacheValues) + slot * bytes;
            }
            __syncwarp();
            // Pieces counted from the start of the first chunk. Past the end: read the last one again and store
            // nothing, so that no load hangs on a branch.
            uint32_t const skipped = first - firstChunk * piecesPerChunk;
            uint32_t const mine = skipped + lane;
            uint32_t const end = skipped + min(pieces - first, kTILE);
            uint64_t from[kLOADS];
#pragma unroll
            for (uint32_t k = 0; k < kLOADS; ++k)
            {
                from[k] = addressOf(sources[warp], min(mine + k * 32, end - 1), piecesPerChunk, reciprocal);
            }
            uint4 data[kLOADS];
#pragma unroll
            for (uint32_t k = 0; k < kLOADS; ++k)
            {
                data[k] = loadOnce(from[k]);
            }
#pragma unroll
            for (uint32_t k = 0; k < kLOADS; ++k)
            {
                if (mine + k * 32 < end)
                {
                    store(addressOf(targets[warp], mine + k * 32, piecesPerChunk, reciprocal), data[k]);
                }
            }
        }
    }
}

} // namespace

cudaError_t fetchValues(
    View const& view, int32_t layer, int32_t begin, int32_t end, int32_t blocks, cudaStream_t stream)
{
    if (begin < 0 || end < begin || end > view.maxBatch || layer < 0 || layer >= view.layers || blocks < 1)
    {
        return cudaErrorInvalidValue;
    }
    if (begin == end)
    {
        return cudaSuccess;
    }
    uint32_t const kvHeads = static_cast<uint32_t>(view.kvHeads);
    uint32_t const piecesPerChunk = static_cast<uint32_t>(valueChunkBytes(view)) / kPIECE; // 32 to 256
    return launchEarly(view.startsEarly, fetchKernel, dim3(static_cast<uint32_t>(blocks)), kTHREADS, 0, stream, view,
        layer, static_cast<uint32_t>(begin) * kvHeads, static_cast<uint32_t>(end - begin) * kvHeads, piecesPerChunk,
        (kONE + piecesPerChunk - 1) / piecesPerChunk);
}

} // namespace trtllm_shadowkv::kernels
