// What selectChunks ranks by: log-sum-exps of the query heads, keys in the order of the scores, and bins that find the
// wanted-th best of many. One block works on one KV head of one batch row.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels::ranking
{

inline constexpr int32_t kTHREADS = 512;
inline constexpr int32_t kWARP = 32;
inline constexpr int32_t kWARPS = kTHREADS / kWARP;
inline constexpr int32_t kSUM_LOADS = 4; // partial sums that a thread has in flight
inline constexpr int32_t kBIN_BITS = 11;
inline constexpr int32_t kBINS = 1 << kBIN_BITS;
inline constexpr int32_t kCANDIDATES = 4096; // of the list

// A candidate: its score's key in the upper word and, in the lower one, what is larger for a lower id. All differ.
inline constexpr int32_t kID_SHIFT = 14;
inline constexpr uint32_t kMAX_ID = (1U << (kWARP - kID_SHIFT)) - 1U;
inline constexpr uint32_t kLOWEST_KEY = 0x007fffffU; // of -inf
inline constexpr uint64_t kLOWEST = uint64_t{kLOWEST_KEY} << 32;

static_assert(4 * kTHREADS == kBINS, "a thread looks at four bins");
static_assert(kMAX_TOKENS / kUNIT <= kMAX_ID + 1 && kMAX_TOP_K <= kCANDIDATES);

// Partial sum of exponentials, exp(maximum) * sum; minimum: of the maxima in it that are above -inf.
struct alignas(16) Part
{
    float maximum;
    float minimum;
    float sum;
};

static_assert(sizeof(Part) * kWARPS * kMAX_GROUP_HEADS <= sizeof(uint64_t) * kCANDIDATES);

// What the warps of the block tell each other.
struct alignas(16) Shared
{
    float logSums[kMAX_GROUP_HEADS]; // log-sum-exp of each query head
    uint64_t few[kWARP];             // candidates of one bin
    uint32_t counts[2][kWARPS];      // of each warp
    uint32_t bin;                    // the bin that holds the last chunk to be selected,
    uint32_t rank;                   // its rank in there, from 1,
    uint32_t size;                   // and the number of chunks in there
    uint32_t kept;                   // items
    uint32_t listed;                 // candidates, perhaps more than the list holds
    uint32_t fews;
};

__device__ __forceinline__ int32_t threadOf()
{
    return static_cast<int32_t>(threadIdx.x);
}

__device__ __forceinline__ int32_t laneOf()
{
    return threadOf() % kWARP;
}

__device__ __forceinline__ int32_t warpOf()
{
    return threadOf() / kWARP;
}

// Sums over the warps before this one, and over all.
__device__ __forceinline__ uint32_t countBefore(uint32_t const (&counts)[kWARPS])
{
    return __reduce_add_sync(kFULL_WARP, laneOf() < warpOf() ? counts[laneOf()] : 0U);
}

__device__ __forceinline__ uint32_t countAll(uint32_t const (&counts)[kWARPS])
{
    return __reduce_add_sync(kFULL_WARP, laneOf() < kWARPS ? counts[laneOf()] : 0U);
}

// Lanes of the mask below this one.
__device__ __forceinline__ uint32_t onesBelow(uint32_t mask)
{
    return ones(mask & ((1U << laneOf()) - 1U));
}

// Room for `count` new elements for the warp, which `counter` counts.
__device__ __forceinline__ uint32_t reserve(uint32_t& counter, uint32_t count)
{
    uint32_t const at = laneOf() == 0 ? atomicAdd(&counter, count) : 0U;
    return __shfl_sync(kFULL_WARP, at, 0);
}

// The least score whose key is at least this one, which is one of a number or between two.
__device__ __forceinline__ float scoreOf(uint32_t key)
{
    return __uint_as_float(key ^ (static_cast<uint32_t>(static_cast<int32_t>(~key) >> 31) | 0x80000000U));
}

__device__ __forceinline__ uint64_t candidateOf(uint32_t key, int32_t chunk)
{
    return uint64_t{key} << 32 | (kMAX_ID - static_cast<uint32_t>(chunk)) << kID_SHIFT;
}

__device__ __forceinline__ int32_t chunkOf(uint64_t candidate)
{
    return static_cast<int32_t>(kMAX_ID - (static_cast<uint32_t>(candidate) >> kID_SHIFT));
}

// --- log-sum-exp -----------------------------------------------------------------------------------------------------

// sum * exp(maximum - base)
__device__ __forceinline__ float weigh(float sum, float maximum, float base)
{
    return maximum == -INFINITY ? 0.0F : sum * expf(maximum - base);
}

// Of the lanes that are a multiple of `distance`, a power of two, apart. All get the same bits.
__device__ __forceinline__ Part join(Part part, int32_t distance)
{
    float const own = part.maximum;
#pragma unroll 1
    for (int32_t offset = kWARP / 2; offset >= distance; offset /= 2)
    {
        part.maximum = fmaxf(part.maximum, __shfl_xor_sync(kFULL_WARP, part.maximum, offset));
        part.minimum = fminf(part.minimum, __shfl_xor_sync(kFULL_WARP, part.minimum, offset));
    }
    part.sum = weigh(part.sum, own, part.maximum);
#pragma unroll 1
    for (int32_t offset = kWARP / 2; offset >= distance; offset /= 2)
    {
        part.sum += __shfl_xor_sync(kFULL_WARP, part.sum, offset);
    }
    return part;
}

// The partial sums of a KV head, [items, stride, 2]. A lane stays with one query head, the lane's number modulo a power
// of two.
struct Sums
{
    float const* values;
    int32_t items;
    int32_t stride;
    int32_t group;
    int32_t shift; // log2 of that power of two

    __device__ __forceinline__ int32_t head() const
    {
        return threadOf() & ((1 << shift) - 1);
    }
    // Items first + k * step() are this thread's.
    __device__ __forceinline__ int32_t first() const
    {
        return threadOf() >> shift;
    }
    __device__ __forceinline__ int32_t step() const
    {
        return kTHREADS >> shift;
    }
};

// Of the lane's query head: log-sum-exp, +inf where it is not finite (a logit minus that is -inf or NaN, which counts
// as -inf). Of the KV head: the keys of its best chunk and of a score that the best chunks of few items are below.
struct Scale
{
    float logSum;
    uint32_t best;
    uint32_t worst;
};

// Also Shared::logSums: NaN where there is no such head. The order of a sum depends on the row's length and the group
// alone.
__device__ __forceinline__ Scale sumHeads(Sums const& sums, Part* parts, Shared& shared)
{
    Part part{-INFINITY, INFINITY, 0.0F};
    if (sums.head() < sums.group)
    {
#pragma unroll 1
        for (int32_t first = sums.first(); first < sums.items; first += kSUM_LOADS * sums.step())
        {
            float2 loaded[kSUM_LOADS];
            float maximum = part.maximum;
#pragma unroll
            for (int32_t k = 0; k < kSUM_LOADS; ++k)
            {
                int32_t const item = first + k * sums.step();
                loaded[k] = make_float2(-INFINITY, 0.0F);
                if (item < sums.items)
                {
                    loaded[k] = reinterpret_cast<float2 const*>(sums.values)[item * sums.stride + sums.head()];
                }
            }
#pragma unroll
            for (int32_t k = 0; k < kSUM_LOADS; ++k)
            {
                maximum = fmaxf(maximum, loaded[k].x);
                part.minimum = loaded[k].x == -INFINITY ? part.minimum : fminf(part.minimum, loaded[k].x);
            }
            part.sum = weigh(part.sum, part.maximum, maximum);
            part.maximum = maximum;
#pragma unroll
            for (int32_t k = 0; k < kSUM_LOADS; ++k)
            {
                part.sum += weigh(loaded[k].y, loaded[k].x, maximum);
            }
        }
    }
    part = join(part, 1 << sums.shift);
    if (laneOf() >> sums.shift == 0)
    {
        parts[warpOf() * kMAX_GROUP_HEADS + laneOf()] = part;
    }
    __syncthreads();
    // Every warp adds all parts up, which saves a barrier.
    part = {-INFINITY, INFINITY, 0.0F};
    for (int32_t warp = laneOf() >> sums.shift; warp < kWARPS; warp += kWARP >> sums.shift)
    {
        part.maximum = fmaxf(part.maximum, parts[warp * kMAX_GROUP_HEADS + sums.head()].maximum);
    }
    for (int32_t warp = laneOf() >> sums.shift; warp < kWARPS; warp += kWARP >> sums.shift)
    {
        Part const other = parts[warp * kMAX_GROUP_HEADS + sums.head()];
        part.minimum = fminf(part.minimum, other.minimum);
        part.sum += weigh(other.sum, other.maximum, part.maximum);
    }
    part = join(part, 1 << sums.shift);
    float logSum = part.maximum + logf(part.sum);
    logSum = isfinite(logSum) ? logSum : INFINITY;
    if (threadOf() < kMAX_GROUP_HEADS)
    {
        shared.logSums[threadOf()] = threadOf() < sums.group ? logSum : NAN;
    }
    // Without NaN: the difference of two infinities.
    return {logSum, __reduce_max_sync(kFULL_WARP, keyOf(fmaxf(-INFINITY, part.maximum - logSum))),
        __reduce_max_sync(kFULL_WARP, keyOf(fmaxf(-INFINITY, part.minimum - logSum)))};
}

// --- bins ------------------------------------------------------------------------------------------------------------

// Bins of equal width from `low` up; the last one is open.
struct Range
{
    uint64_t low;
    int32_t shift; // log2 of a bin's width, at least kID_SHIFT
    uint32_t top;  // the largest key
};

// Up to the last candidate with the key.
__device__ __forceinline__ Range rangeTo(uint64_t low, uint32_t key)
{
    uint64_t const high = uint64_t{key} << 32 | 0xffffffffU;
    return {low, max(kID_SHIFT, 64 - __clzll(static_cast<long long>(high - low)) - kBIN_BITS), key};
}

__device__ __forceinline__ void countIn(uint32_t* bins, Range range, uint64_t candidate)
{
    uint64_t const bin = (candidate - range.low) >> range.shift;
    atomicAdd(bins + static_cast<uint32_t>(min(bin, uint64_t{kBINS - 1})), 1U);
}

// Finds the bin that holds the wanted-th best of what was counted; the last one where there are fewer, and none where
// there is nothing. Clears the bins. Returns how many were counted.
__device__ __forceinline__ uint32_t findBin(uint32_t* bins, uint32_t wanted, Shared& shared)
{
    uint4 const four = reinterpret_cast<uint4 const*>(bins)[threadIdx.x];
    reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    uint32_t const own = four.x + four.y + four.z + four.w;
    uint32_t above = own; // then: of this and all higher lanes
#pragma unroll
    for (int32_t offset = 1; offset < kWARP; offset *= 2)
    {
        uint32_t const higher = __shfl_down_sync(kFULL_WARP, above, offset);
        above += laneOf() + offset < kWARP ? higher : 0U;
    }
    if (laneOf() == 0)
    {
        shared.counts[0][warpOf()] = above;
    }
    __syncthreads();
    uint32_t const all = countAll(shared.counts[0]);
    wanted = min(wanted, all);
    // What is above this thread's bins: in its higher lanes, and in all warps but this one and those before it.
    above += all - countBefore(shared.counts[0]) - shared.counts[0][warpOf()] - own;
    uint32_t const sizes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int32_t k = 3; k >= 0; --k)
    {
        if (above < wanted && wanted <= above + sizes[k])
        {
            shared.bin = 4 * threadIdx.x + static_cast<uint32_t>(k);
            shared.rank = wanted - above;
            shared.size = sizes[k];
        }
        above += sizes[k];
    }
    __syncthreads();
    return all;
}

// Bins within the one that was found. What is above that one is counted in higher bins and so keeps its place.
__device__ __forceinline__ Range within(Range range, Shared const& shared)
{
    return {
        range.low + (uint64_t{shared.bin} << range.shift), max(kID_SHIFT, range.shift - (kBIN_BITS - 1)), range.top};
}

} // namespace trtllm_shadowkv::kernels::ranking
