// First half of selectChunks: from logits to the key that the best chunks reach. One block works on one KV head of one
// batch row.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels::ranking
{

inline constexpr int32_t kTHREADS = 512;
inline constexpr int32_t kWARP = 32;
inline constexpr int32_t kWARPS = kTHREADS / kWARP;
inline constexpr int32_t kLOADS = 8; // loads of logits that a thread has in flight
// Bins of one digit of a key: the highest 11 bits, then 11, then 10.
inline constexpr int32_t kBINS = 2048;
inline constexpr int32_t kFIRST_SHIFT = 21;
inline constexpr int32_t kSECOND_SHIFT = 10;
inline constexpr int32_t kPARTIAL_STRIDE = kWARPS + 1; // odd: no bank conflicts

static_assert(4 * kTHREADS == kBINS, "a thread looks at four bins");
static_assert(kMAX_GROUP_HEADS == kWARPS, "a warp sums one query head");
static_assert(kMAX_GROUP_HEADS * kPARTIAL_STRIDE * sizeof(float2) <= kBINS * sizeof(uint32_t));

// What the warps of the block tell each other.
struct alignas(16) Shared
{
    float logSums[kMAX_GROUP_HEADS]; // log-sum-exp of each query head
    uint32_t counts[2][kWARPS];      // of each warp
    uint32_t bin;                    // the bin that holds the last chunk to be selected,
    uint32_t rank;                   // its rank in there, from 1,
    uint32_t size;                   // and the number of chunks in there
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

__device__ __forceinline__ uint32_t ones(uint32_t mask)
{
    return static_cast<uint32_t>(__popc(static_cast<int32_t>(mask)));
}

// --- log-sum-exp -----------------------------------------------------------------------------------------------------

// A sum of exponentials: exp(maximum) * sum.
struct ExpSum
{
    float maximum;
    float sum;
};

__device__ __forceinline__ ExpSum add(ExpSum a, ExpSum b)
{
    float const maximum = fmaxf(a.maximum, b.maximum);
    float const base = maximum == -INFINITY ? 0.0F : maximum; // nothing in both: exp(-inf), not exp(-inf + inf)
    return {maximum, a.sum * expf(a.maximum - base) + b.sum * expf(b.maximum - base)};
}

__device__ __forceinline__ ExpSum addOther(ExpSum a, int32_t offset)
{
    return add(a, {__shfl_xor_sync(kFULL_WARP, a.maximum, offset), __shfl_xor_sync(kFULL_WARP, a.sum, offset)});
}

// Shared::logSums from the partial sums [items, stride, 2]. +inf where it is not finite: a logit minus that is -inf or
// NaN, which counts as -inf. NaN where there is no such head. The order of a sum depends on the row's length and the
// group alone.
__device__ __forceinline__ void sumHeads(
    float const* sums, int32_t items, int32_t stride, int32_t group, float2* partials, Shared& shared)
{
    int32_t const shift = kWARP - __clz(group - 1); // a power of two of heads, so that a lane stays with one
    int32_t const head = threadOf() & ((1 << shift) - 1);
    ExpSum total{-INFINITY, 0.0F};
    if (head < group)
    {
#pragma unroll 2
        for (int32_t item = threadOf() >> shift; item < items; item += kTHREADS >> shift)
        {
            float2 const part = reinterpret_cast<float2 const*>(sums)[item * stride + head];
            total = add(total, {part.x, part.x == -INFINITY ? 0.0F : part.y});
        }
    }
    for (int32_t offset = 1 << shift; offset < kWARP; offset *= 2)
    {
        total = addOther(total, offset);
    }
    if (laneOf() >> shift == 0)
    {
        partials[laneOf() * kPARTIAL_STRIDE + warpOf()] = make_float2(total.maximum, total.sum);
    }
    __syncthreads();
    float logSum = NAN;
    if (warpOf() < group)
    {
        float2 const part = partials[warpOf() * kPARTIAL_STRIDE + laneOf() % kWARPS];
        total = {part.x, part.y};
#pragma unroll
        for (int32_t offset = 1; offset < kWARPS; offset *= 2)
        {
            total = addOther(total, offset);
        }
        logSum = total.maximum + logf(total.sum);
        logSum = isfinite(logSum) ? logSum : INFINITY;
    }
    if (laneOf() == 0)
    {
        shared.logSums[warpOf()] = logSum;
    }
    __syncthreads();
}

// --- keys ------------------------------------------------------------------------------------------------------------

// An unsigned number in the order of the floats (both zeros alike); -inf is 0x007fffff, so that 0 is free for outliers.
__device__ __forceinline__ uint32_t keyOf(float score)
{
    uint32_t const bits = __float_as_uint(score + 0.0F);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
}

template <int32_t kVECTOR>
struct alignas(4 * kVECTOR) Vector
{
    float values[kVECTOR];
};

template <int32_t kVECTOR>
__device__ __forceinline__ Vector<kVECTOR> loadLogits(float const* address)
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

// Keys of the chunks `first` + 512 k, counted in bins by their first digit. Every logit of an outlier is NaN, and no
// logit of another chunk; a difference may be NaN, and then counts as -inf.
template <int32_t kVECTOR, bool kWHOLE>
__device__ __forceinline__ void makeTile(float const* logits, int32_t stride, int32_t first, int32_t chunks,
    float const* logSums, uint32_t* keys, bool keysInShared, uint32_t* bins)
{
    float const* const from = logits + size_t{static_cast<uint32_t>(first)} * static_cast<uint32_t>(stride);
    float scores[kLOADS];
    for (int32_t head = 0; head < stride; head += kVECTOR)
    {
        Vector<kVECTOR> loaded[kLOADS] = {};
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            if (kWHOLE || first + k * kTHREADS < chunks)
            {
                loaded[k] = loadLogits<kVECTOR>(from + k * kTHREADS * stride + head);
            }
        }
        Vector<kVECTOR> const base = *reinterpret_cast<Vector<kVECTOR> const*>(logSums + head);
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
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
        }
    }
    if (!keysInShared)
    {
        __syncthreads();
    }
#pragma unroll
    for (int32_t k = 0; k < kLOADS; ++k)
    {
        if (kWHOLE || first + k * kTHREADS < chunks)
        {
            uint32_t const key = isnan(scores[k]) ? 0U : keyOf(scores[k]);
            keys[first + k * kTHREADS] = key;
            atomicAdd(bins + (key >> kFIRST_SHIFT), 1U);
        }
    }
}

// Keys of all chunks and the histogram of their first digit. Where shared memory has no room for the keys, they go to
// the front of the logits: the key of chunk c overwrites logits of chunk c / stride, which the block has read by then.
template <int32_t kVECTOR>
__device__ __forceinline__ void makeKeys(float const* logits, int32_t stride, int32_t chunks, float const* logSums,
    uint32_t* keys, bool keysInShared, uint32_t* bins)
{
    constexpr int32_t kTILE = kTHREADS * kLOADS;
    int32_t first = threadOf();
#pragma unroll 1
    for (int32_t left = chunks; left >= kTILE; left -= kTILE, first += kTILE)
    {
        makeTile<kVECTOR, true>(logits, stride, first, chunks, logSums, keys, keysInShared, bins);
    }
    if (chunks % kTILE != 0)
    {
        makeTile<kVECTOR, false>(logits, stride, first, chunks, logSums, keys, keysInShared, bins);
    }
    __syncthreads();
    // Outliers are not ranked: no other key is below the first bin's end.
    if (threadIdx.x == 0)
    {
        reinterpret_cast<uint4*>(bins)->x = 0;
    }
}

// Keys of the chunks first + k * step, 0 past the end. All are loaded before one is used.
__device__ __forceinline__ void loadKeys(
    uint32_t (&loaded)[kLOADS], uint32_t const* keys, int32_t first, int32_t step, int32_t end)
{
#pragma unroll
    for (int32_t k = 0; k < kLOADS; ++k)
    {
        loaded[k] = first + k * step < end ? keys[first + k * step] : 0U;
    }
}

// --- threshold -------------------------------------------------------------------------------------------------------

// Selected are the chunks whose key is above `key`, and of those whose key is equal the first `equal`.
struct Threshold
{
    uint32_t key;
    uint32_t equal;
};

// Finds the bin that holds the wanted-th largest key; fewer are wanted where there are not so many, and none where
// there is no key. Clears `other`. Returns how many are wanted.
__device__ __forceinline__ uint32_t findBin(uint32_t const* bins, uint32_t* other, uint32_t wanted, Shared& shared)
{
    uint4 const four = reinterpret_cast<uint4 const*>(bins)[threadIdx.x];
    reinterpret_cast<uint4*>(other)[threadIdx.x] = make_uint4(0, 0, 0, 0);
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
    // The keys above this thread's bins: of its higher lanes, and of all warps but this one and those before it.
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
    return wanted;
}

// Radix selection, digit by digit from the highest. `bins` holds the first histogram, and room for another. Lowers
// `wanted` to the number of chunks that are no outliers.
__device__ __forceinline__ Threshold findThreshold(
    uint32_t const* keys, int32_t chunks, uint32_t* bins, uint32_t& wanted, Shared& shared)
{
    wanted = findBin(bins, bins + kBINS, wanted, shared);
    if (wanted == 0)
    {
        return {0, 0};
    }
    uint32_t low = shared.bin << kFIRST_SHIFT; // the lowest key of the bin
    int32_t shift = kFIRST_SHIFT;
    int32_t counted = 0; // the set of bins that was used last
    while (shared.size != shared.rank && shift > 0)
    {
        uint32_t const rank = shared.rank;
        int32_t const nextShift = shift == kFIRST_SHIFT ? kSECOND_SHIFT : 0;
        counted = kBINS - counted;
#pragma unroll 1
        for (int32_t first = threadOf(); first < chunks; first += kTHREADS * kLOADS)
        {
            uint32_t loaded[kLOADS];
            loadKeys(loaded, keys, first, kTHREADS, chunks);
#pragma unroll
            for (int32_t k = 0; k < kLOADS; ++k)
            {
                uint32_t const offset = loaded[k] - low; // of key 0: too large
                if (offset >> shift == 0)
                {
                    atomicAdd(bins + counted + (offset >> nextShift), 1U);
                }
            }
        }
        __syncthreads();
        findBin(bins + counted, bins + (kBINS - counted), rank, shared);
        low += shared.bin << nextShift;
        shift = nextShift;
    }
    // All of the bin: what is above the key before it (key 0 has no bin, so there is one).
    return shared.size == shared.rank ? Threshold{low - 1, 0} : Threshold{low, shared.rank};
}

} // namespace trtllm_shadowkv::kernels::ranking
