#include "kernels/decode/decode.h"
#include "kernels/decode/ranking.cuh"

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

// Shared memory in words: Shared, two sets of bins (later chosen, slotOf, victims), bit map, ranks, keys where they
// fit.
__host__ __device__ constexpr int32_t wordsOf(int32_t chunks)
{
    return (chunks + kWARP - 1) / kWARP;
}

__host__ __device__ constexpr int32_t tableWords(int32_t topK)
{
    return 3 * topK > 2 * kBINS ? 3 * topK : 2 * kBINS;
}

__host__ __device__ constexpr int32_t bytesWithoutKeys(int32_t topK, int32_t chunks)
{
    return static_cast<int32_t>(sizeof(Shared) + sizeof(uint32_t) * (tableWords(topK) + 2 * wordsOf(chunks)));
}

__host__ __device__ constexpr int32_t bytesWithKeys(int32_t topK, int32_t chunks)
{
    return bytesWithoutKeys(topK, chunks) + static_cast<int32_t>(sizeof(uint32_t)) * chunks;
}

static_assert(bytesWithoutKeys(kMAX_TOP_K, kMAX_TOKENS / kUNIT) <= 99 * 1024, "of the smallest device");

// Lanes of the mask below this one.
__device__ __forceinline__ uint32_t onesBelow(uint32_t mask)
{
    return ones(mask & ((1U << laneOf()) - 1U));
}

// Bit map of the selected chunks, the rank of the first one in each word, and the list of all in ascending order.
__device__ __forceinline__ void mark(uint32_t const* keys, int32_t chunks, Threshold threshold, uint32_t* bits,
    uint32_t* ranks, int32_t* chosen, int32_t* slotOf, Shared& shared)
{
    int32_t const words = wordsOf(chunks);
    int32_t const perWarp = (words + kWARPS - 1) / kWARPS;
    int32_t const begin = warpOf() * perWarp;
    int32_t const end = min(begin + perWarp, words);
    uint32_t above = 0;
    uint32_t equal = 0;
#pragma unroll 1
    for (int32_t first = begin; first < end; first += kLOADS)
    {
        uint32_t loaded[kLOADS];
        loadKeys(loaded, keys, first * kWARP + laneOf(), kWARP, min(end * kWARP, chunks));
        uint32_t aboveMask = 0;
        uint32_t equalMask = 0;
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            uint32_t const higher = __ballot_sync(kFULL_WARP, loaded[k] > threshold.key);
            uint32_t const same = __ballot_sync(kFULL_WARP, loaded[k] == threshold.key);
            above += ones(higher);
            equal += ones(same);
            aboveMask = laneOf() == k ? higher : aboveMask;
            equalMask = laneOf() == k ? same : equalMask;
        }
        if (laneOf() < min(kLOADS, end - first))
        {
            bits[first + laneOf()] = aboveMask;
            ranks[first + laneOf()] = equalMask;
        }
    }
    if (laneOf() == 0)
    {
        shared.counts[0][warpOf()] = above;
        shared.counts[1][warpOf()] = equal;
    }
    __syncthreads();
    above = countBefore(shared.counts[0]);
    equal = countBefore(shared.counts[1]);
    for (int32_t first = begin; first < end; first += kWARP)
    {
        int32_t const word = first + laneOf();
        uint32_t selected = word < end ? bits[word] : 0U;
        uint32_t ties = word < end ? ranks[word] : 0U;
        // Two counts up to 1024 in one register.
        uint32_t const own = ones(selected) | ones(ties) << 16;
        uint32_t sum = own;
#pragma unroll
        for (int32_t offset = 1; offset < kWARP; offset *= 2)
        {
            uint32_t const lower = __shfl_up_sync(kFULL_WARP, sum, offset);
            sum += laneOf() >= offset ? lower : 0U;
        }
        uint32_t const tiesBefore = min(equal + ((sum - own) >> 16), threshold.equal);
        uint32_t rank = above + ((sum - own) & 0xffffU) + tiesBefore;
        uint32_t const keep = threshold.equal - tiesBefore;
        ties = keep == 0 ? 0U : ties;
        while (ones(ties) > keep)
        {
            ties ^= 0x80000000U >> __clz(static_cast<int32_t>(ties));
        }
        selected |= ties;
        if (word < end)
        {
            bits[word] = selected;
            ranks[word] = rank;
        }
        for (; selected != 0; selected &= selected - 1, ++rank)
        {
            chosen[rank] = word * kWARP + __ffs(static_cast<int32_t>(selected)) - 1;
            slotOf[rank] = -1;
        }
        sum = __shfl_sync(kFULL_WARP, sum, kWARP - 1);
        above += sum & 0xffffU;
        equal += sum >> 16;
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
        asm volatile("prefetch.global.L2 [%0];" : : "l"(cache.order + i));
    }
}

// Looks the chosen chunks up: each entry of the order tests its chunk's bit. The first entries that are not hit give
// their slots to the misses; the others move to the front, and the chosen chunks follow. Returns the hits.
__device__ __forceinline__ int32_t lookUp(Cache const& cache, int2* result, int32_t chunks, int32_t count,
    uint32_t const* bits, uint32_t const* ranks, int32_t const* chosen, int32_t* slotOf, int32_t* victims,
    Shared& shared)
{
    // A warp takes neighbouring entries. All are in registers before the first is written.
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
        int2 loaded[kORDER_GROUP];
#pragma unroll
        for (int32_t k = 0; k < kORDER_GROUP; ++k)
        {
            int32_t const i = (warpOf() * tiles + group + k) * kWARP + laneOf();
            bool const inside = group + k < tiles && i < cache.slots;
            loaded[k] = inside ? cache.order[i] : make_int2(-1, -1);
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
__global__ void __launch_bounds__(kTHREADS, 2) selectKernel(
    __grid_constant__ View const view, int32_t layer, int32_t* selection, int32_t begin, int32_t sharedBytes)
{
    extern __shared__ uint4 sharedMemory[];
    Shared& shared = *reinterpret_cast<Shared*>(sharedMemory);
    uint32_t* const tables = reinterpret_cast<uint32_t*>(&shared + 1);
    int32_t* const chosen = reinterpret_cast<int32_t*>(tables); // once the bins are no longer needed

    int32_t const b = begin + static_cast<int32_t>(blockIdx.y);
    int32_t const h = static_cast<int32_t>(blockIdx.x);
    size_t const pair = size_t{static_cast<uint32_t>(b)} * view.kvHeads + h;
    StepRow const& step = view.steps[b];
    int32_t const chunks = step.row.published;
    int32_t const items = step.scoreItems;
    int32_t const itemsBefore = step.scoreBegin;
    uint32_t count = 0;
    int32_t hits = 0;
    if (step.row.sealedRow >= 0 && chunks > 0)
    {
        prefetchOrder(cacheOf(view, layer, step.row.sealedRow, h));
        reinterpret_cast<uint4*>(tables)[threadIdx.x] = make_uint4(0, 0, 0, 0);

        size_t const item
            = size_t{static_cast<uint32_t>(itemsBefore)} * view.kvHeads + size_t{static_cast<uint32_t>(h)} * items;
        sumHeads(view.logitSums + item * view.logitStride * 2, items, view.logitStride, view.group,
            reinterpret_cast<float2*>(tables + kBINS), shared);
        uint32_t* const bits = tables + tableWords(view.topK);
        uint32_t* const ranks = bits + wordsOf(chunks);
        float* const logits = view.logits + item * kSCORE_CHUNKS * view.logitStride;
        bool const keysInShared = bytesWithKeys(view.topK, chunks) <= sharedBytes;
        uint32_t* const keys = keysInShared ? ranks + wordsOf(chunks) : reinterpret_cast<uint32_t*>(logits);
        makeKeys<kVECTOR>(logits, view.logitStride, chunks, shared.logSums, keys, keysInShared, tables);

        count = static_cast<uint32_t>(step.row.topK);
        Threshold const threshold = findThreshold(keys, chunks, tables, count, shared);
        if (count > 0)
        {
            int32_t* const slotOf = chosen + view.topK;
            mark(keys, chunks, threshold, bits, ranks, chosen, slotOf, shared);
            // Made again: registers are short in between.
            Cache const cache = cacheOf(view, layer, step.row.sealedRow, h);
            hits = lookUp(cache, reinterpret_cast<int2*>(view.entries + pair * static_cast<uint32_t>(view.topK)),
                chunks, static_cast<int32_t>(count), bits, ranks, chosen, slotOf, slotOf + view.topK, shared);
        }
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
cudaError_t launch(View const& view, int32_t layer, int32_t* selection, int32_t begin, int32_t end, int32_t sharedBytes,
    cudaStream_t stream)
{
    cudaError_t const error
        = cudaFuncSetAttribute(selectKernel<kVECTOR>, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes);
    if (error != cudaSuccess)
    {
        return error;
    }
    dim3 const grid(static_cast<uint32_t>(view.kvHeads), static_cast<uint32_t>(end - begin));
    selectKernel<kVECTOR><<<grid, kTHREADS, sharedBytes, stream>>>(view, layer, selection, begin, sharedBytes);
    return cudaGetLastError();
}

} // namespace

int32_t selectSharedBytes(View const& view, int32_t chunks, int32_t limit)
{
    int32_t const all = bytesWithKeys(view.topK, chunks);
    return all <= limit ? all : bytesWithoutKeys(view.topK, chunks);
}

cudaError_t selectChunks(View const& view, int32_t layer, int32_t* selection, int32_t begin, int32_t end,
    int32_t sharedBytes, cudaStream_t stream)
{
    if (end <= begin)
    {
        return cudaSuccess;
    }
    return view.logitStride % 4 == 0 ? launch<4>(view, layer, selection, begin, end, sharedBytes, stream)
                                     : launch<2>(view, layer, selection, begin, end, sharedBytes, stream);
}

} // namespace trtllm_shadowkv::kernels
