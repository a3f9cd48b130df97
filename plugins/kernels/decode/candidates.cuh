// First half of selectChunks: from logits to a short list that holds the best chunks.
//
// Only what can matter is read. The best score in an item of 32 chunks follows from the item's maxima, to the bit: a
// rounded difference never falls where the logit rises. If there are topK items whose best score is at least x, there
// are topK chunks that score at least x, and nothing of an item whose best score is lower is selected. So the items are
// ranked first, and of the better ones the logits are read once: chunks that score at least x go to a list, in any
// order, and are counted in bins from x up to the best score. Should the list be too short or too long, x changes and
// the logits are read again.
#pragma once

#include "kernels/decode/ranking.cuh"

namespace trtllm_shadowkv::kernels::ranking
{

template <int32_t kVECTOR>
inline constexpr int32_t kLOADS = kVECTOR == 4 ? 6 : 8; // items whose logits a warp has in flight: by the registers
inline constexpr int32_t kGUESS = 3; // topK up to so many times the items: few enough score above the worst item's best

// --- items -----------------------------------------------------------------------------------------------------------

// Keys of the items' best chunks, counted in bins.
__device__ __forceinline__ void rankItems(
    Sums const& sums, float logSum, Range range, uint32_t* itemKeys, uint32_t* bins)
{
#pragma unroll 1
    for (int32_t first = 0; first < sums.items; first += kSUM_LOADS * sums.step())
    {
        float best[kSUM_LOADS];
#pragma unroll
        for (int32_t k = 0; k < kSUM_LOADS; ++k)
        {
            int32_t const item = first + k * sums.step() + sums.first();
            bool const inside = item < sums.items && sums.head() < sums.group;
            float const maximum = inside ? sums.values[(item * sums.stride + sums.head()) * 2] : -INFINITY;
            best[k] = fmaxf(-INFINITY, maximum - logSum);
        }
#pragma unroll 1
        for (int32_t offset = 1; offset < 1 << sums.shift; offset *= 2)
        {
#pragma unroll
            for (int32_t k = 0; k < kSUM_LOADS; ++k)
            {
                best[k] = fmaxf(best[k], __shfl_xor_sync(kFULL_WARP, best[k], offset));
            }
        }
#pragma unroll
        for (int32_t k = 0; k < kSUM_LOADS; ++k)
        {
            int32_t const item = first + k * sums.step() + sums.first();
            if (sums.head() == 0 && item < sums.items)
            {
                uint32_t const key = keyOf(best[k]);
                itemKeys[item] = key;
                if (uint64_t const candidate = uint64_t{key} << 32; candidate >= range.low)
                {
                    countIn(bins, range, candidate);
                }
            }
        }
    }
    __syncthreads();
}

// The items whose best chunk's key is at least `key`, in any order.
__device__ __forceinline__ void keepItems(
    uint32_t const* itemKeys, int32_t items, uint32_t key, uint16_t* kept, Shared& shared)
{
#pragma unroll 1
    for (int32_t first = 0; first < items; first += kTHREADS)
    {
        int32_t const item = first + threadOf();
        bool const isKept = item < items && itemKeys[item] >= key;
        uint32_t const mask = __ballot_sync(kFULL_WARP, isKept);
        uint32_t const at = reserve(shared.kept, ones(mask)) + onesBelow(mask);
        if (isKept)
        {
            kept[at] = static_cast<uint16_t>(item);
        }
    }
}

__device__ __forceinline__ void keepAll(int32_t items, uint16_t* kept)
{
    for (int32_t item = threadOf(); item < items; item += kTHREADS)
    {
        kept[item] = static_cast<uint16_t>(item);
    }
}

// --- candidates ------------------------------------------------------------------------------------------------------

template <int32_t kVECTOR>
struct alignas(4 * kVECTOR) Vector
{
    float values[kVECTOR];
};

template <int32_t kVECTOR>
__device__ __forceinline__ Vector<kVECTOR> loadLogits(void const* address)
{
    if constexpr (kVECTOR == 4)
    {
        uint4 const v = loadStream(address);
        return {{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
    }
    else
    {
        uint2 const v = loadStream2(address);
        return {{__uint_as_float(v.x), __uint_as_float(v.y)}};
    }
}

// Lists the chunks of the kept items from range.low up, as many as there is room for, and counts all of them in bins. A
// warp takes an item at a time, a lane a chunk. As soon as a load was used, that of the item kITEMS further is started.
// Every logit of an outlier, and past the end, is NaN, and no logit of another chunk; a difference may be NaN, and then
// counts as -inf.
template <int32_t kVECTOR>
__device__ __forceinline__ void collect(float const* logits, int32_t stride, uint16_t const* kept, int32_t count,
    Range range, uint64_t* list, uint32_t* bins, Shared& shared)
{
    constexpr int32_t kITEMS = kLOADS<kVECTOR>;
    uint32_t const itemBytes = static_cast<uint32_t>(kWARP * stride) * static_cast<uint32_t>(sizeof(float));
    // Of the heads from `head` on. The compiler must not see through the pointer: it would work out every address anew.
    auto const heads = [&](int32_t head)
    {
        char const* const from = reinterpret_cast<char const*>(logits + laneOf() * stride + head);
        return opaque(from);
    };
    auto const load = [&](char const* from, int32_t i)
    { return loadLogits<kVECTOR>(from + uint64_t{static_cast<uint32_t>(kept[i])} * itemBytes); };
    // No score is above the best one unless sums and logits do not agree: the search must end even then.
    auto const candidateOfScore
        = [&](float score, int32_t i) { return candidateOf(min(keyOf(score), range.top), kept[i] * kWARP + laneOf()); };
    float const low = scoreOf(static_cast<uint32_t>(range.low >> 32));
    bool const hasId = static_cast<uint32_t>(range.low) != 0; // among equal scores the range starts at a chunk
    char const* const begin = heads(0);
    Vector<kVECTOR> loaded[kITEMS] = {};
#pragma unroll
    for (int32_t k = 0; k < kITEMS; ++k)
    {
        if (warpOf() + k * kWARPS < count)
        {
            loaded[k] = load(begin, warpOf() + k * kWARPS);
        }
    }
#pragma unroll 1
    for (int32_t first = warpOf(); first < count; first += kWARPS * kITEMS)
    {
        float scores[kITEMS];
#pragma unroll 1
        for (int32_t head = 0; head < stride; head += kVECTOR)
        {
            Vector<kVECTOR> const base = *reinterpret_cast<Vector<kVECTOR> const*>(shared.logSums + head);
            bool const isLast = head + kVECTOR >= stride;
            int32_t const next = isLast ? first + kWARPS * kITEMS : first;
            char const* const from = heads(isLast ? 0 : head + kVECTOR);
#pragma unroll
            for (int32_t k = 0; k < kITEMS; ++k)
            {
                if (head == 0)
                {
                    scores[k] = isnan(loaded[k].values[0]) ? NAN : -INFINITY;
                }
#pragma unroll
                for (int32_t i = 0; i < kVECTOR; ++i)
                {
                    scores[k] = fmaxf(scores[k], loaded[k].values[i] - base.values[i]); // NaN only of two NaN
                }
                if (next + k * kWARPS < count)
                {
                    loaded[k] = load(from, next + k * kWARPS);
                }
            }
        }
        uint32_t mine = 0; // bit k: this lane's chunk of item k
#pragma unroll
        for (int32_t k = 0; k < kITEMS; ++k)
        {
            mine |= scores[k] >= low ? 1U << k : 0U; // not NaN
        }
        // What is left in the registers of an item that is not there is another one's.
        int32_t const items = min((count - first + kWARPS - 1) / kWARPS, kITEMS);
        mine &= (1U << items) - 1U;
        if (hasId)
        {
#pragma unroll
            for (int32_t k = 0; k < kITEMS; ++k)
            {
                int32_t const i = min(first + k * kWARPS, count - 1);
                uint64_t const candidate = candidateOfScore(scores[k], i);
                mine &= candidate >= range.low ? kFULL_WARP : ~(1U << k);
            }
        }
        uint32_t const found = __reduce_add_sync(kFULL_WARP, ones(mine));
        if (found == 0)
        {
            continue;
        }
        uint32_t at = reserve(shared.listed, found);
#pragma unroll 1
        for (uint32_t mask; (mask = __ballot_sync(kFULL_WARP, mine != 0)) != 0; mine &= mine - 1U)
        {
            if (mine != 0)
            {
                float score = 0.0F; // of the lowest bit's item
#pragma unroll
                for (int32_t k = kITEMS - 1; k >= 0; --k)
                {
                    score = (mine >> k & 1U) != 0 ? scores[k] : score;
                }
                int32_t const i = first + (__ffs(static_cast<int32_t>(mine)) - 1) * kWARPS;
                uint64_t const candidate = candidateOfScore(score, i);
                if (uint32_t const to = at + onesBelow(mask); to < kCANDIDATES)
                {
                    list[to] = candidate;
                }
                countIn(bins, range, candidate);
            }
            at += ones(mask);
        }
    }
    __syncthreads();
}

// --- search ----------------------------------------------------------------------------------------------------------

// In shared memory.
struct Tables
{
    uint32_t* bins;  // [kBINS] zero
    uint64_t* list;  // [kCANDIDATES] first Part [kWARPS, kMAX_GROUP_HEADS]
    uint32_t* words; // [items] for use in between; zero in the end
    uint16_t* kept;  // [items]
};

// Selected are the listed candidates from `high` up, and of the others from `low` up the best `rank`: of at most kWARP,
// or all of them.
struct Best
{
    uint64_t low;
    uint64_t high;
    uint32_t rank;
    bool isWhole; // all of them
    uint32_t listed;
    uint32_t wanted; // topK, or all chunks that are no outliers
};

template <int32_t kVECTOR>
__device__ __forceinline__ Best findBest(
    Sums const& sums, float const* logits, uint32_t wanted, Tables const& tables, Shared& shared)
{
    Scale const scale = sumHeads(sums, reinterpret_cast<Part*>(tables.list), shared);
    uint64_t low = kLOWEST;
    int32_t kept = sums.items;
    if (scale.best > kLOWEST_KEY && wanted <= static_cast<uint32_t>(kGUESS * sums.items))
    {
        Range const range = rangeTo(uint64_t{scale.worst} << 32, scale.best);
        rankItems(sums, scale.logSum, range, tables.words, tables.bins);
        if (findBin(tables.bins, wanted, shared) > 0)
        {
            low = range.low + (uint64_t{shared.bin} << range.shift);
        }
        keepItems(tables.words, sums.items, static_cast<uint32_t>(low >> 32), tables.kept, shared);
        __syncthreads();
        kept = static_cast<int32_t>(shared.kept);
    }
    else
    {
        keepAll(sums.items, tables.kept);
        __syncthreads();
    }
#pragma unroll 1
    for (int32_t i = threadOf(); i < sums.items; i += kTHREADS)
    {
        tables.words[i] = 0;
    }
    Range range = rangeTo(low, scale.best);
    uint32_t found = 0;
#pragma unroll 1
    while (true)
    {
        collect<kVECTOR>(logits, sums.stride, tables.kept, kept, range, tables.list, tables.bins, shared);
        found = findBin(tables.bins, wanted, shared);
        if (found < wanted && range.low > kLOWEST)
        {
            keepAll(sums.items, tables.kept);
            kept = sums.items;
            range = rangeTo(kLOWEST, scale.best);
        }
        else
        {
            wanted = min(wanted, found);
            if (found <= kCANDIDATES)
            {
                break;
            }
            // At the narrowest a bin holds one chunk, and then topK are found.
            range = within(range, shared);
        }
        if (threadIdx.x == 0)
        {
            shared.listed = 0;
        }
        __syncthreads();
    }
    if (wanted == 0)
    {
        return {0, 0, 0, true, 0, 0};
    }
#pragma unroll 1
    while (shared.size != shared.rank && shared.size > kWARP)
    {
        range = within(range, shared);
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < found; i += kTHREADS)
        {
            uint64_t const candidate = tables.list[i];
            if (candidate >= range.low)
            {
                countIn(tables.bins, range, candidate);
            }
        }
        __syncthreads();
        findBin(tables.bins, wanted, shared);
    }
    low = range.low + (uint64_t{shared.bin} << range.shift);
    return {low, low + (uint64_t{1} << range.shift), shared.rank, shared.rank == shared.size, found, wanted};
}

} // namespace trtllm_shadowkv::kernels::ranking
