#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

#include "kernels/decode/rebuild_tile.cuh"
#include "kernels/decode/scan.cuh"

#include <algorithm>

// Keys of a head's tokens are A B, [tokens, r] times [r, D]. B is kept in registers while a block stays with a head: a
// warp has 16 dimensions and their RoPE partners, D / 2 further, for all of r. Rows of A come through shared memory, a
// tile of 32 tokens at a time and kSTAGES tiles in turn. All warps of a block read every row.
//
// The missing chunks of all rows and heads are one list; every block takes an equal stretch of it.
namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kWARP = 32;
constexpr uint32_t kSTAGES = 3;      // 2 where shared memory does not allow it
constexpr int32_t kSM_THREADS = 384; // of a multiprocessor: 168 registers a thread
constexpr int32_t kDIMENSIONS = 16;  // of a warp, and as many partners
constexpr uint32_t kWINDOW = 256;    // chunks whose addresses are looked up at once
constexpr uint32_t kPAIRS = 1024;    // pairs of batch row and KV head in one list; more follow in further rounds

struct alignas(16) Chunk
{
    uint32_t page; // of A, counted over all layers
    uint32_t id;
    uint32_t key;  // place in cacheKeys, in chunks
    uint32_t head; // sealedHead()
};

struct Work
{
    uint32_t begins[kPAIRS + 1]; // misses of the pairs before; an empty pair begins where the next one does
    Chunk chunks[kWINDOW];
    uint8_t runs[kWINDOW]; // chunks from here on that make a tile: of the same head, in the window
    uint32_t warpSums[4];
};

// Fills work.begins with `count` pairs from `first` on (index b * H + h) and returns how many misses they have.
template <uint32_t kTHREADS>
__device__ __forceinline__ uint32_t listMisses(View const& v, uint32_t first, uint32_t count, Work& work)
{
    for (uint32_t i = threadIdx.x; i < count; i += kTHREADS)
    {
        uint32_t const pair = first + i;
        int32_t const misses = v.missCounts[pair];
        bool const isSealed = v.steps[pair / static_cast<uint32_t>(v.kvHeads)].row.sealedRow >= 0;
        work.begins[i] = isSealed ? static_cast<uint32_t>(misses) : 0; // else a dense row or padding
    }
    __syncthreads();
    uint32_t const each = (count + kTHREADS - 1) / kTHREADS;
    uint32_t const begin = min(threadIdx.x * each, count);
    uint32_t const end = min(begin + each, count);
    uint32_t sum = 0;
    for (uint32_t i = begin; i < end; ++i)
    {
        sum += work.begins[i];
    }
    uint32_t total;
    uint32_t before = blockExclusiveSum(sum, work.warpSums, total);
    for (uint32_t i = begin; i < end; ++i)
    {
        uint32_t const misses = work.begins[i];
        work.begins[i] = before;
        before += misses;
    }
    if (threadIdx.x == 0)
    {
        work.begins[count] = total;
    }
    __syncthreads();
    return total;
}

// The pair of a miss, which is below the total: the last one that begins at or before it.
__device__ __forceinline__ uint32_t pairOf(Work const& work, uint32_t count, uint32_t miss)
{
    uint32_t pair = 0;
#pragma unroll
    for (uint32_t step = kPAIRS / 2; step > 0; step /= 2)
    {
        uint32_t const next = pair + step;
        pair = next < count && work.begins[next] <= miss ? next : pair;
    }
    return pair;
}

// Looks up misses [first, first + count) of `pairs` pairs from `firstPair` on.
template <uint32_t kTHREADS>
__device__ __forceinline__ void lookUp(
    View const& v, int32_t layer, uint32_t firstPair, uint32_t pairs, uint32_t first, uint32_t count, Work& work)
{
    uint32_t const kvHeads = static_cast<uint32_t>(v.kvHeads);
    for (uint32_t i = threadIdx.x; i < count; i += kTHREADS)
    {
        uint32_t const miss = first + i;
        uint32_t const place = pairOf(work, pairs, miss);
        uint32_t const pair = firstPair + place;
        StepRow const& step = v.steps[pair / kvHeads];
        uint32_t const head
            = static_cast<uint32_t>(sealedHead(v, layer, step.row.sealedRow, static_cast<int32_t>(pair % kvHeads)));
        Entry const entry = v.entries[size_t{pair} * v.topK + v.hitCounts[pair] + (miss - work.begins[place])];
        work.chunks[i] = {static_cast<uint32_t>(layer * v.sealedPages + sealedPage(v, step.slot, entry.chunk)),
            static_cast<uint32_t>(entry.chunk), head * v.cacheSlots + entry.slot, head};
        uint32_t const run = min(work.begins[place + 1], first + count) - miss;
        work.runs[i] = static_cast<uint8_t>(min(run, static_cast<uint32_t>(kTILE_TOKENS) >> v.chunkShift));
    }
    __syncthreads();
}

// Starts copying a tile, a unit a warp at a time, and returns how many chunks it has. `to`: address of the stage.
template <typename T, int32_t D>
__device__ __forceinline__ uint32_t copyTile(
    View const& v, Layout const& layout, Work const& work, uint32_t at, uint32_t to)
{
    uint32_t const lane = threadIdx.x % kWARP;
    uint32_t const shift = static_cast<uint32_t>(v.chunkShift) - 3;
    uint32_t const run = work.runs[at];
    uint32_t const rowPieces = static_cast<uint32_t>(layout.rank) / 8;
    uint32_t const padding = static_cast<uint32_t>(layout.pitch) / kPIECE - rowPieces;
    for (uint32_t unit = threadIdx.x / kWARP; unit < run << shift; unit += D / kWARP)
    {
        Chunk const chunk = work.chunks[at + (unit >> shift)];
        uint32_t const token = (chunk.id << v.chunkShift) + (unit & ((1U << shift) - 1)) * kUNIT;
        char const* const rows = reinterpret_cast<char const*>(
            static_cast<T const*>(v.factorA)
            + (size_t{chunk.page} * kSEALED_PAGE_TOKENS + token % kSEALED_PAGE_TOKENS) * layout.rank);
        uint32_t const unitTo = to + unit * kUNIT * layout.pitch;
#pragma unroll 5
        for (uint32_t piece = lane; piece < rowPieces * kUNIT; piece += kWARP)
        {
            uint32_t const row = piece * layout.reciprocal / kONE;
            copyAsync<kPIECE>(unitTo + (piece + row * padding) * kPIECE, rows + piece * kPIECE);
        }
        if (lane < D / 4)
        {
            float const* const turn = v.ropeTurns + size_t{token / kUNIT} * D;
            copyAsync<kPIECE>(to + kTILE_TOKENS * layout.pitch + (unit * (D / 4) + lane) * kPIECE, turn + lane * 4);
        }
    }
    return run;
}

// Which of the blocks [0, used) takes which stretch: blocks that share a multiprocessor, as far as one can tell, take
// neighbouring ones, and often find B in its L1.
__device__ __forceinline__ uint32_t stretchOf(uint32_t block, uint32_t used, uint32_t multiprocessors)
{
    uint32_t const place = block % multiprocessors;
    return place * (used / multiprocessors) + min(place, used % multiprocessors) + block / multiprocessors;
}

template <typename T, int32_t D>
__global__ void __launch_bounds__(D, kSM_THREADS / D)
    rebuildKernel(__grid_constant__ View const v, __grid_constant__ Layout const layout, int32_t layer,
        uint32_t firstPair, uint32_t pairCount, uint32_t multiprocessors, uint32_t stages)
{
    uint4* const ring = dynamicShared<uint4>();
    __shared__ Work work;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % kWARP;
    int32_t const g = lane / 4;
    int32_t const t = lane % 4;
    int32_t const d = static_cast<int32_t>(threadIdx.x) / kWARP * kDIMENSIONS + 2 * g; // and d + 1: the lane's own
    uint32_t const ringAddress = sharedAddress(ring);
    bool const isOneSlab = layout.blocks <= kSLAB;
    if (layout.rank % kK_BLOCK != 0)
    {
        // Half of the last block of every row is never copied, and is multiplied by zeros.
        for (uint32_t i = threadIdx.x; i < stages * layout.stageBytes / kPIECE; i += D)
        {
            ring[i] = make_uint4(0, 0, 0, 0);
        }
    }
    Columns columns;
    uint32_t head = ~0U; // of `columns`
    auto const loadHead = [&](uint32_t newHead, int32_t firstBlock)
    {
        head = newHead;
        T const* const factorB = static_cast<T const*>(v.factorB);
        loadColumns<T, D>(factorB + (size_t{head} * D + d) * layout.rank, layout, firstBlock, columns);
    };
    uint32_t const tileChunks = static_cast<uint32_t>(kTILE_TOKENS) >> v.chunkShift;
    for (uint32_t base = 0; base < pairCount; base += kPAIRS)
    {
        __syncthreads(); // all are done with the round before
        uint32_t const pairs = min(pairCount - base, kPAIRS);
        uint32_t const total = listMisses<D>(v, firstPair + base, pairs, work);
        letNextStart(); // not at once: a fetch that starts together with this kernel is to get its multiprocessors first
        // One block a multiprocessor until all have two tiles: B is a greater load than a tile.
        uint32_t const used = min(
            min(gridDim.x, (total + tileChunks - 1) / tileChunks), max(multiprocessors, total / (2 * tileChunks)));
        if (blockIdx.x >= used)
        {
            continue;
        }
        uint32_t const stretch = stretchOf(blockIdx.x, used, multiprocessors);
        uint32_t first = stretch * (total / used) + min(stretch, total % used);
        uint32_t left = total / used + (stretch < total % used ? 1 : 0);
        for (; left > 0; first += kWINDOW)
        {
            __syncthreads(); // all are done with the window before
            uint32_t const count = min(left, kWINDOW);
            left -= count;
            lookUp<D>(v, layer, firstPair + base, pairs, first, count, work);
            uint32_t ahead = 0; // next chunk to copy
            uint32_t stage = 0;
            for (uint32_t i = 0; i + 1 < stages; ++i)
            {
                if (ahead < count)
                {
                    ahead += copyTile<T, D>(v, layout, work, ahead, ringAddress + i * layout.stageBytes);
                }
                commitCopies();
            }
            for (uint32_t at = 0; at < count;)
            {
                if (isOneSlab && work.chunks[at].head != head)
                {
                    loadHead(work.chunks[at].head, 0);
                }
                if (stages == kSTAGES)
                {
                    waitForCopies<kSTAGES - 2>();
                }
                else
                {
                    waitForCopies<0>();
                }
                __syncthreads(); // the tile is here, and all are done with the one before
                if (ahead < count)
                {
                    uint32_t const free = (stage == 0 ? stages : stage) - 1;
                    ahead += copyTile<T, D>(v, layout, work, ahead, ringAddress + free * layout.stageBytes);
                }
                commitCopies();
                char const* const tile = reinterpret_cast<char const*>(ring) + stage * layout.stageBytes;
                char const* const rows = tile + g * layout.pitch + t * kPIECE;
                stage = stage + 1 == stages ? 0 : stage + 1;
                Sums sums = {};
                if (layout.blocks == kSLAB)
                {
                    multiply<T, true>(rows, layout.pitch, kSLAB, columns, sums);
                }
                else
                {
#pragma unroll 1
                    for (int32_t block = 0; block < layout.blocks; block += kSLAB)
                    {
                        if (!isOneSlab)
                        {
                            loadHead(work.chunks[at].head, block);
                        }
                        multiply<T, false>(
                            rows + block * kK_BLOCK * 2, layout.pitch, layout.blocks - block, columns, sums);
                    }
                }
                // Read anew for each tile: in registers during the product they would be too many.
                float4 steps[2]; // of tokens 2t, 2t + 1 of any unit
#pragma unroll
                for (int32_t j = 0; j < 2; ++j)
                {
                    steps[j] = *reinterpret_cast<float4 const*>(v.ropeSteps + ((2 * t + j) * (D / 2) + d) * 2);
                }
                uint32_t const run = work.runs[at];
                float4 const* const turns = reinterpret_cast<float4 const*>(tile + kTILE_TOKENS * layout.pitch) + d / 2;
                uint32_t const shift = static_cast<uint32_t>(v.chunkShift) - 3;
#pragma unroll
                for (uint32_t unit = 0; unit < kTILE_UNITS; ++unit)
                {
                    if (unit < run << shift)
                    {
                        size_t const key = size_t{work.chunks[at + (unit >> shift)].key} << v.chunkShift;
                        uint32_t const token = (unit & ((1U << shift) - 1)) * kUNIT + 2 * t;
                        storeUnit<T, D>(sums[0][unit], sums[1][unit], turns[unit * (D / 4)], steps,
                            static_cast<T*>(v.cacheKeys) + (key + token) * D + d);
                    }
                }
                at += run;
            }
        }
    }
}

} // namespace

cudaError_t rebuildKeys(
    View const& view, int32_t layer, int32_t begin, int32_t end, int32_t multiprocessors, cudaStream_t stream)
{
    if (begin < 0 || end < begin || end > view.maxBatch || layer < 0 || layer >= view.layers || multiprocessors < 1)
    {
        return cudaErrorInvalidValue;
    }
    if (begin == end)
    {
        return cudaSuccess;
    }
    int32_t limit = 0;
    cudaError_t error = sharedMemoryLimit(limit);
    if (error != cudaSuccess)
    {
        return error;
    }
    return dispatchShape(view,
        [&](auto tag, auto headSize)
        {
            using T = decltype(tag);
            constexpr int32_t kD = decltype(headSize)::value;
            auto const kernel = rebuildKernel<T, kD>;
            Layout const layout(view.rank, kD);
            int32_t const ringLimit = limit - static_cast<int32_t>(sizeof(Work));
            uint32_t const stages = layout.stageBytes * static_cast<int32_t>(kSTAGES) <= ringLimit ? kSTAGES : 2;
            int32_t const bytes = layout.stageBytes * static_cast<int32_t>(stages);
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
            int32_t resident = 0;
            if (error == cudaSuccess)
            {
                error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kD, bytes);
            }
            if (error != cudaSuccess)
            {
                return error;
            }
            uint32_t const pairs = static_cast<uint32_t>((end - begin) * view.kvHeads);
            uint64_t const tiles = (uint64_t{pairs} * view.topK * view.chunkSize + kTILE_TOKENS - 1) / kTILE_TOKENS;
            uint64_t const blocks = std::min(tiles, uint64_t{1} * std::max(resident, 1) * multiprocessors);
            return launch(kernel, static_cast<uint32_t>(blocks), kD, bytes, stream, view, layout, layer,
                static_cast<uint32_t>(begin * view.kvHeads), pairs, static_cast<uint32_t>(multiprocessors), stages);
        });
}

} // namespace trtllm_shadowkv::kernels
