#include "kernels/decode/candidates.cuh"
#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

using namespace ranking;

constexpr int32_t kORDER_LOADS = kMAX_CACHE_SLOTS / kTHREADS;
constexpr int32_t kORDER_GROUP = 4; // that many are under way at a time
// An entry of the cache's order in one register: chunk + 1 above, slot below.
constexpr int32_t kSLOT_BITS = 13;
constexpr uint32_t kSLOT_MASK = (1U << kSLOT_BITS) - 1U;
constexpr uint32_t kNO_ENTRY = 0xffffffffU;

static_assert(kSCORE_CHUNKS == kWARP, "a word of the bit map is one ballot");
static_assert(kMAX_CACHE_SLOTS <= 1 << kSLOT_BITS && kMAX_TOKENS / kUNIT < (1 << (32 - kSLOT_BITS)) - 2);

// Shared memory: Shared; bins; the list, later chosen, slotOf and victims; a word an item: key of its best chunk, later
// bit map of its selected chunks; half a word an item: the kept items, later the rank of its first selected chunk.
__host__ __device__ constexpr int32_t wordsOf(int32_t chunks)
{
    return (chunks + kSCORE_CHUNKS - 1) / kSCORE_CHUNKS;
}

__host__ __device__ constexpr int32_t bytesOf(int32_t chunks)
{
    return static_cast<int32_t>(sizeof(Shared) + sizeof(uint32_t) * kBINS + sizeof(uint64_t) * kCANDIDATES)
           + wordsOf(chunks) * static_cast<int32_t>(sizeof(uint32_t) + sizeof(uint16_t));
}

static_assert(bytesOf(kMAX_TOKENS / kUNIT) <= 99 * 1024, "of the smallest device");
static_assert(3 * sizeof(int32_t) * kMAX_TOP_K <= sizeof(uint64_t) * kCANDIDATES);

// --- bit map ---------------------------------------------------------------------------------------------------------

// A warp takes a power of two of words.
__device__ __forceinline__ int32_t warpShift(int32_t words)
{
    return kWARP - __clz((words + kWARPS - 1) / kWARPS - 1);
}

__device__ __forceinline__ void choose(uint64_t candidate, int32_t shift, uint32_t* bits, Shared& shared)
{
    int32_t const chunk = chunkOf(candidate);
    atomicOr(bits + chunk / kWARP, 1U << chunk % kWARP);
    atomicAdd(&shared.counts[1][chunk / kWARP >> shift], 1U);
}

// Bit map of the selected chunks, and how many there are in each warp's words.
__device__ __forceinline__ void mark(
    uint64_t const* list, Best const& best, int32_t shift, uint32_t* bits, Shared& shared)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < best.listed; i += kTHREADS)
    {
        uint64_t const candidate = list[i];
        if (candidate >= (best.isWhole ? best.low : best.high))
        {
            choose(candidate, shift, bits, shared);
        }
        else if (candidate >= best.low)
        {
            shared.few[atomicAdd(&shared.fews, 1U)] = candidate;
        }
    }
    __syncthreads();
    if (best.isWhole)
    {
        return;
    }
    uint32_t const fews = shared.fews;
    uint64_t const own = laneOf() < static_cast<int32_t>(fews) ? shared.few[laneOf()] : 0U;
#pragma unroll 1
    for (uint32_t i = static_cast<uint32_t>(warpOf()); i < fews; i += kWARPS)
    {
        uint64_t const candidate = shared.few[i];
        uint32_t const above = ones(__ballot_sync(kFULL_WARP, own > candidate));
        if (above < best.rank && laneOf() == 0)
        {
            choose(candidate, shift, bits, shared);
        }
    }
    __syncthreads();
}

// The rank of the first selected chunk of each word, and the list of all in ascending order.
__device__ __forceinline__ void expand(uint32_t const* bits, int32_t words, int32_t shift, uint16_t* ranks,
    int32_t* chosen, int32_t* slotOf, Shared& shared)
{
    uint32_t before = countBefore(shared.counts[1]);
    int32_t const begin = warpOf() << shift;
    int32_t const end = min((warpOf() + 1) << shift, words);
#pragma unroll 1
    for (int32_t first = begin; first < end; first += kWARP)
    {
        int32_t const word = first + laneOf();
        uint32_t selected = word < end ? bits[word] : 0U;
        uint32_t sum = ones(selected);
        uint32_t rank = before - sum;
#pragma unroll
        for (int32_t offset = 1; offset < kWARP; offset *= 2)
        {
            uint32_t const lower = __shfl_up_sync(kFULL_WARP, sum, offset);
            sum += laneOf() >= offset ? lower : 0U;
        }
        rank += sum;
        before += __shfl_sync(kFULL_WARP, sum, kWARP - 1);
        if (word < end)
        {
            ranks[word] = static_cast<uint16_t>(rank);
        }
#pragma unroll 1
        for (; selected != 0; selected &= selected - 1, ++rank)
        {
            chosen[rank] = word * kWARP + __ffs(static_cast<int32_t>(selected)) - 1;
            slotOf[rank] = -1;
        }
    }
    __syncthreads();
}

// --- cache -----------------------------------------------------------------------------------------------------------

// The order of the chunk cache of a row and KV head.
struct Cache
{
    int2* order; // [slots] chunk, slot
    int32_t slots;
};

__device__ __forceinline__ Cache cacheOf(View const& view, int32_t layer, int32_t sealedRow, int32_t head)
{
    size_t const first = sealedHead(view, layer, sealedRow, head) * static_cast<uint32_t>(view.cacheSlots);
    return {reinterpret_cast<int2*>(view.cacheOrder + first), view.cacheSlots};
}

// It was last used a step ago: brings it into L2 while the logits are read.
__device__ __forceinline__ void prefetchOrder(Cache const& cache)
{
    constexpr int32_t kLINE = 128 / sizeof(int2);
#pragma unroll 1
    for (int32_t i = threadOf() * kLINE; i < cache.slots; i += kTHREADS * kLINE)
    {
        prefetchL2(cache.order + i);
    }
}

// The entries of the order that a thread looks at: `first` to first + kORDER_GROUP of its own. A warp takes neighbours.
__device__ __forceinline__ void loadOrder(int2 (&loaded)[kORDER_GROUP], Cache const& cache, int32_t first)
{
    int32_t const tiles = (cache.slots + kTHREADS - 1) / kTHREADS;
#pragma unroll
    for (int32_t k = 0; k < kORDER_GROUP; ++k)
    {
        int32_t const i = (warpOf() * tiles + first + k) * kWARP + laneOf();
        loaded[k] = first + k < tiles && i < cache.slots ? cache.order[i] : make_int2(-1, -1);
    }
}

// Looks the chosen chunks up: each entry of the order tests its chunk's bit. The first entries that are not hit give
// their slots to the misses; the others move to the front, and the chosen chunks follow. `loaded` holds the first group
// of entries. Returns the hits.
__device__ __forceinline__ int32_t lookUp(Cache const& cache, int2 (&loaded)[kORDER_GROUP], int2* result,
    int32_t chunks, int32_t count, uint32_t const* bits, uint16_t const* ranks, int32_t const* chosen, int32_t* slotOf,
    int32_t* victims, Shared& shared)
{
    // All are in registers before the first is written.
    int32_t const tiles = (cache.slots + kTHREADS - 1) / kTHREADS;
    uint32_t entries[kORDER_LOADS];
    uint32_t others = 0;
#pragma unroll
    for (int32_t group = 0; group < kORDER_LOADS; group += kORDER_GROUP)
    {
        if (group >= tiles)
        {
            break;
        }
        if (group > 0)
        {
            loadOrder(loaded, cache, group);
        }
#pragma unroll
        for (int32_t k = 0; k < kORDER_GROUP; ++k)
        {
            uint32_t const packed
                = static_cast<uint32_t>(loaded[k].x + 1) << kSLOT_BITS | static_cast<uint32_t>(loaded[k].y);
            entries[group + k] = loaded[k].y < 0 ? kNO_ENTRY : packed;
        }
    }
#pragma unroll
    for (int32_t k = 0; k < kORDER_LOADS; ++k)
    {
        if (k >= tiles)
        {
            break;
        }
        // A free entry and kNO_ENTRY are no chunk of the row.
        uint32_t const chunk = (entries[k] >> kSLOT_BITS) - 1U;
        if (chunk < static_cast<uint32_t>(chunks))
        {
            uint32_t const word = bits[chunk / kWARP];
            uint32_t const bit = 1U << chunk % kWARP;
            if ((word & bit) != 0)
            {
                uint32_t const rank = ranks[chunk / kWARP] + ones(word & (bit - 1U));
                slotOf[rank] = static_cast<int32_t>(entries[k] & kSLOT_MASK);
                entries[k] = kNO_ENTRY;
            }
        }
        others += ones(__ballot_sync(kFULL_WARP, entries[k] != kNO_ENTRY));
    }
    if (laneOf() == 0)
    {
        shared.counts[0][warpOf()] = others;
    }
    __syncthreads();
    int32_t const hits = cache.slots - static_cast<int32_t>(countAll(shared.counts[0]));
    int32_t const misses = count - hits;
    int32_t before = static_cast<int32_t>(countBefore(shared.counts[0]));
#pragma unroll
    for (int32_t k = 0; k < kORDER_LOADS; ++k)
    {
        if (k >= tiles)
        {
            break;
        }
        uint32_t const mask = __ballot_sync(kFULL_WARP, entries[k] != kNO_ENTRY);
        int32_t const to = before + static_cast<int32_t>(onesBelow(mask)) - misses;
        before += __popc(mask);
        if (entries[k] != kNO_ENTRY)
        {
            int32_t const slot = static_cast<int32_t>(entries[k] & kSLOT_MASK);
            if (to < 0)
            {
                victims[to + misses] = slot;
            }
            else
            {
                cache.order[to] = make_int2(static_cast<int32_t>(entries[k] >> kSLOT_BITS) - 1, slot);
            }
        }
    }
    int32_t const parts = (count + kTHREADS - 1) / kTHREADS;
    uint32_t missing = 0;
#pragma unroll 1
    for (int32_t k = 0; k < parts; ++k)
    {
        int32_t const i = (warpOf() * parts + k) * kWARP + laneOf();
        missing += ones(__ballot_sync(kFULL_WARP, i < count && slotOf[i] < 0));
    }
    if (laneOf() == 0)
    {
        shared.counts[1][warpOf()] = missing;
    }
    __syncthreads();
    before = static_cast<int32_t>(countBefore(shared.counts[1]));
#pragma unroll 1
    for (int32_t k = 0; k < parts; ++k)
    {
        int32_t const i = (warpOf() * parts + k) * kWARP + laneOf();
        int32_t slot = i < count ? slotOf[i] : 0;
        uint32_t const mask = __ballot_sync(kFULL_WARP, slot < 0);
        int32_t const miss = before + static_cast<int32_t>(onesBelow(mask)); // misses before this chunk
        before += __popc(mask);
        if (i < count)
        {
            bool const hit = slot >= 0;
            slot = hit ? slot : victims[miss];
            int2 const entry = make_int2(chosen[i], slot);
            result[hit ? i - miss : hits + miss] = entry;
            cache.order[cache.slots - count + i] = entry;
        }
    }
    return hits;
}

// One block a KV head (x) of a batch row (y).
template <int32_t kVECTOR>
__global__ void __launch_bounds__(kTHREADS, 2)
    selectKernel(__grid_constant__ View const view, int32_t layer, int32_t* selection, int32_t begin)
{
    uint4* const sharedMemory = dynamicShared<uint4>();
    Shared& shared = *reinterpret_cast<Shared*>(sharedMemory);
    uint32_t* const bins = reinterpret_cast<uint32_t*>(&shared + 1);
    uint64_t* const list = reinterpret_cast<uint64_t*>(bins + kBINS);
    int32_t* const chosen = reinterpret_cast<int32_t*>(list); // once the list is no longer needed

    int32_t const b = begin + static_cast<int32_t>(blockIdx.y);
    int32_t const h = static_cast<int32_t>(blockIdx.x);
    size_t const pair = size_t{static_cast<uint32_t>(b)} * view.kvHeads + h;
    StepRow const& step = view.steps[b];
    int32_t const chunks = step.row.published;
    int32_t const items = step.scoreItems;
    int32_t const itemsBefore = step.scoreBegin;
    uint32_t const wanted = static_cast<uint32_t>(step.row.topK);
    uint32_t count = 0;
    int32_t hits = 0;
    if (step.row.sealedRow >= 0 && chunks > 0)
    {
        prefetchOrder(cacheOf(view, layer, step.row.sealedRow, h));
        reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x < kWARPS)
        {
            shared.counts[1][threadIdx.x] = 0;
        }
        if (threadIdx.x == 0)
        {
            shared.kept = 0;
            shared.listed = 0;
            shared.fews = 0;
        }
        afterPrevious();

        size_t const item
            = size_t{static_cast<uint32_t>(itemsBefore)} * view.kvHeads + size_t{static_cast<uint32_t>(h)} * items;
        Sums const sums{view.logitSums + item * view.logitStride * 2, items, view.logitStride, view.group,
            kWARP - __clz(view.group - 1)};
        uint32_t* const bits = reinterpret_cast<uint32_t*>(list + kCANDIDATES);
        uint16_t* const ranks = reinterpret_cast<uint16_t*>(bits + items);
        Best const best = findBest<kVECTOR>(
            sums, view.logits + item * kSCORE_CHUNKS * view.logitStride, wanted, {bins, list, bits, ranks}, shared);
        count = best.wanted;
        if (count > 0)
        {
            // Made again: registers are short in between.
            Cache const cache = cacheOf(view, layer, view.steps[b].row.sealedRow, h);
            int2 order[kORDER_GROUP]; // on their way while the bit map is made
            loadOrder(order, cache, 0);
            int32_t const shift = warpShift(items);
            mark(list, best, shift, bits, shared);
            int32_t* const slotOf = chosen + view.topK;
            expand(bits, items, shift, ranks, chosen, slotOf, shared);
            hits = lookUp(cache, order, reinterpret_cast<int2*>(view.entries + pair * static_cast<uint32_t>(view.topK)),
                chunks, static_cast<int32_t>(count), bits, ranks, chosen, slotOf, slotOf + view.topK, shared);
        }
    }
    else
    {
        afterPrevious();
    }
#pragma unroll 1
    for (int32_t i = threadOf(); i < view.topK; i += kTHREADS)
    {
        selection[pair * static_cast<uint32_t>(view.topK) + i] = i < static_cast<int32_t>(count) ? chosen[i] : -1;
    }
    if (threadIdx.x == 0)
    {
        int32_t const misses = static_cast<int32_t>(count) - hits;
        view.hitCounts[pair] = hits;
        view.missCounts[pair] = misses;
        if (count > 0)
        {
            atomicAdd(&view.counters[step.slot].hits, static_cast<unsigned long long>(hits));
            atomicAdd(&view.counters[step.slot].misses, static_cast<unsigned long long>(misses));
        }
    }
}

template <int32_t kVECTOR>
cudaError_t launchSelect(View const& view, int32_t layer, int32_t* selection, int32_t begin, int32_t end,
    int32_t sharedBytes, bool isAfterScore, cudaStream_t stream)
{
    dim3 const grid(static_cast<uint32_t>(view.kvHeads), static_cast<uint32_t>(end - begin));
    return launchEarly(view.startsEarly && isAfterScore, selectKernel<kVECTOR>, grid, kTHREADS, sharedBytes, stream,
        view, layer, selection, begin);
}

} // namespace

int32_t selectSharedBytes(int32_t chunks)
{
    return bytesOf(chunks);
}

cudaError_t selectChunks(View const& view, int32_t layer, int32_t* selection, int32_t begin, int32_t end,
    int32_t sharedBytes, bool isAfterScore, cudaStream_t stream)
{
    if (end <= begin)
    {
        return cudaSuccess;
    }
    return view.logitStride % 4 == 0
               ? launchSelect<4>(view, layer, selection, begin, end, sharedBytes, isAfterScore, stream)
               : launchSelect<2>(view, layer, selection, begin, end, sharedBytes, isAfterScore, stream);
}

} // namespace trtllm_shadowkv::kernels
