#include "kernels/decode/decode.h"
#include "kernels/decode/score_items.cuh"
#include "kernels/launch.cuh"

#include <cmath>

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 512;

// The lane's part of the query heads of one KV head, the second operand, and the factors from a sum of products to a
// score, of heads 8 i + 2t and 8 i + 2t + 1.
template <int32_t D, int32_t NT>
struct Query
{
    uint2 words[NT][D / kMMA_DEPTH];
    float factors[NT][2];
};

// --- operands --------------------------------------------------------------------------------------------------------

// For e4m3: scales a query head by a power of two so that its largest element is in [1, 2), as f16; gives the inverse
// scale. The exponent is clamped to what both it and its negative have as normal numbers, which leaves zeros,
// subnormals, infinities and NaN what they are.
template <typename T, int32_t kSTEPS>
__device__ __forceinline__ float normalise(uint2 (&x)[kSTEPS])
{
    float largest = 0.0F;
#pragma unroll
    for (int32_t s = 0; s < kSTEPS; ++s)
    {
        float2 const a = unpack<T>(x[s].x);
        float2 const b = unpack<T>(x[s].y);
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(a.x), fabsf(a.y))), fmaxf(fabsf(b.x), fabsf(b.y)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFULL_WARP, largest, 2));
    uint32_t const exponent = min(max(__float_as_uint(largest) >> 23, 1U), 253U);
    float const scale = __uint_as_float((254U - exponent) << 23);
#pragma unroll
    for (int32_t s = 0; s < kSTEPS; ++s)
    {
        float2 const a = unpack<T>(x[s].x);
        float2 const b = unpack<T>(x[s].y);
        x[s] = make_uint2(pack<__half>(a.x * scale, a.y * scale), pack<__half>(b.x * scale, b.y * scale));
    }
    return __uint_as_float(exponent << 23);
}

template <typename L, int32_t D, int32_t NT>
__device__ __forceinline__ void loadQuery(View const& v, void const* q, int32_t queries, Query<D, NT>& query)
{
    using S = Shape<L, D>;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % kWARP;
    int32_t const t = lane % 4;
#pragma unroll
    for (int32_t i = 0; i < NT; ++i)
    {
        int32_t const member = lane / 4 + i * kMMA_HEADS;
        size_t const head = size_t{static_cast<uint32_t>(queries)} * v.group + member;
        uint16_t const* const from = static_cast<uint16_t const*>(q) + head * D;
#pragma unroll
        for (int32_t s = 0; s < S::kSTEPS; ++s)
        {
            int32_t const piece = t + 4 * s / S::kPIECE * 4;
            query.words[i][s] = make_uint2(0U, 0U);
            if (member < v.group)
            {
                query.words[i][s] = *reinterpret_cast<uint2 const*>(from + piece * S::kPIECE + 4 * s % S::kPIECE);
            }
        }
        query.factors[i][0] = v.scale;
        query.factors[i][1] = v.scale;
        if constexpr (S::kE4M3)
        {
            float const power = v.element == Element::kF16 ? normalise<__half>(query.words[i])
                                                           : normalise<__nv_bfloat16>(query.words[i]);
            query.factors[i][0] *= __shfl_sync(kFULL_WARP, power, t * 8); // lane (2t, 0) has head 2t
            query.factors[i][1] *= __shfl_sync(kFULL_WARP, power, t * 8 + 4);
        }
    }
}

// --- scores ----------------------------------------------------------------------------------------------------------

template <typename L, int32_t D, int32_t NT>
__device__ __forceinline__ void scoreTile(
    uint8_t const* ring, int32_t tile, Query<D, NT> const& query, float (&sums)[NT][4])
{
    using S = Shape<L, D>;
    using M = std::conditional_t<S::kE4M3, __half, L>;
    using Piece = std::conditional_t<S::kPIECE_BYTES == 16, uint4, uint2>;
    constexpr int32_t kSTEPS = S::kSTEPS / S::kPIECES; // of a piece
    Piece const* const pieces = reinterpret_cast<Piece const*>(ring + tile * S::kTILE_BYTES) + threadIdx.x % kWARP;
#pragma unroll
    for (int32_t i = 0; i < NT; ++i)
    {
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0F;
    }
#pragma unroll
    for (int32_t piece = 0; piece < S::kPIECES; ++piece)
    {
        uint32_t words[2][S::kPIECE_BYTES / 4];
#pragma unroll
        for (int32_t half = 0; half < 2; ++half)
        {
            Piece const x = pieces[(half * S::kPIECES + piece) * kWARP];
            words[half][0] = x.x;
            words[half][1] = x.y;
            if constexpr (S::kPIECE_BYTES == 16)
            {
                words[half][2] = x.z;
                words[half][3] = x.w;
            }
        }
#pragma unroll
        for (int32_t s = 0; s < kSTEPS; ++s)
        {
            uint32_t a[4];
#pragma unroll
            for (int32_t half = 0; half < 2; ++half)
            {
                if constexpr (S::kE4M3)
                {
                    a[half] = halvesOfE4m3(static_cast<uint16_t>(words[half][s] & 0xffffU));
                    a[2 + half] = halvesOfE4m3(static_cast<uint16_t>(words[half][s] >> 16));
                }
                else
                {
                    a[half] = words[half][2 * s];
                    a[2 + half] = words[half][2 * s + 1];
                }
            }
#pragma unroll
            for (int32_t i = 0; i < NT; ++i)
            {
                uint2 const b = query.words[i][piece * kSTEPS + s];
                mma<M>(sums[i], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
    }
}

// From sums of products to logits, in place; NaN becomes -inf. Landmarks are one mean a chunk: a landmark's score is
// the chunk's. Lane (g, t) has chunk 8 j + g and heads 8 i + 2t + k as sums[j / 2][i][2 (j % 2) + k]; `scale` is that
// of landmark `lane`.
template <bool E4M3, int32_t NT>
__device__ __forceinline__ void chunkLogits(float const (&factors)[NT][2], float scale, float (&sums)[kTILES][NT][4])
{
    int32_t const g = static_cast<int32_t>(threadIdx.x) % kWARP / 4;
#pragma unroll
    for (int32_t j = 0; j < 2 * kTILES; ++j)
    {
        float const rowScale = E4M3 ? __shfl_sync(kFULL_WARP, scale, 8 * j + g) : 1.0F;
#pragma unroll
        for (int32_t i = 0; i < NT; ++i)
        {
#pragma unroll
            for (int32_t k = 0; k < 2; ++k)
            {
                float& sum = sums[j / 2][i][j % 2 * 2 + k];
                float const logit = sum * factors[i][k] * rowScale;
                sum = logit == logit ? logit : -INFINITY;
            }
        }
    }
}

// Maximum and sum of exp(logit - maximum) of one head over the chunks of an item that may be selected: four of this
// lane, in the same order for every item.
__device__ __forceinline__ float2 sumLogits(float const (&logits)[2 * kTILES], bool const (&valid)[2 * kTILES])
{
    float largest = -INFINITY;
#pragma unroll
    for (int32_t j = 0; j < 2 * kTILES; ++j)
    {
        largest = valid[j] ? fmaxf(largest, logits[j]) : largest;
    }
#pragma unroll
    for (int32_t offset = 4; offset < kWARP; offset *= 2)
    {
        largest = fmaxf(largest, __shfl_xor_sync(kFULL_WARP, largest, offset));
    }
    bool const finite = !isinf(largest); // it is no NaN
    float sum = 0.0F;
#pragma unroll
    for (int32_t j = 0; j < 2 * kTILES; ++j)
    {
        sum += valid[j] && finite ? __expf(logits[j] - largest) : 0.0F;
    }
#pragma unroll
    for (int32_t offset = 4; offset < kWARP; offset *= 2)
    {
        sum += __shfl_xor_sync(kFULL_WARP, sum, offset);
    }
    return make_float2(largest, finite || largest < 0.0F ? sum : 1.0F);
}

// Writes an item's logits and sums; `index` is its number, bit c of `valid` says whether chunk c may be selected.
template <int32_t NT>
__device__ __forceinline__ void writeItem(
    View const& v, size_t index, uint32_t valid, float const (&logits)[kTILES][NT][4])
{
    float const notSelectable = __uint_as_float(0x7fffffffU);
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % kWARP;
    int32_t const g = lane / 4;
#pragma unroll
    for (int32_t i = 0; i < NT; ++i)
    {
        int32_t const member = i * kMMA_HEADS + lane % 4 * 2;
        float2 sums[2];
        float x[2][2 * kTILES];
#pragma unroll
        for (int32_t k = 0; k < 2; ++k)
        {
            bool const isHead = member + k < v.group;
            bool isValid[2 * kTILES];
#pragma unroll
            for (int32_t j = 0; j < 2 * kTILES; ++j)
            {
                isValid[j] = isHead && (valid >> (8 * j + g) & 1U) != 0U;
                x[k][j] = logits[j / 2][i][j % 2 * 2 + k];
            }
            sums[k] = sumLogits(x[k], isValid);
#pragma unroll
            for (int32_t j = 0; j < 2 * kTILES; ++j)
            {
                x[k][j] = isValid[j] ? x[k][j] : isHead ? notSelectable : 0.0F;
            }
        }
        if (member >= v.logitStride)
        {
            continue;
        }
        float* const to = v.logits + (index * kSCORE_CHUNKS + g) * v.logitStride + member;
#pragma unroll
        for (int32_t j = 0; j < 2 * kTILES; ++j)
        {
            *reinterpret_cast<float2*>(to + 8 * j * v.logitStride) = make_float2(x[0][j], x[1][j]);
        }
        if (g == 0)
        {
            *reinterpret_cast<float4*>(v.logitSums + (index * v.logitStride + member) * 2)
                = make_float4(sums[0].x, sums[0].y, sums[1].x, sums[1].y);
        }
    }
}

// A warp takes a contiguous range of items. Its ring in shared memory holds the tiles of kAHEAD items; a tile is
// refilled as soon as it was read.
template <typename L, int32_t D, int32_t NT>
__global__ void __launch_bounds__(kTHREADS, 1)
    scoreKernel(__grid_constant__ View const v, int32_t layer, void const* q, int32_t begin, int32_t end)
{
    using S = Shape<L, D>;
    uint8_t* const shared = dynamicShared<uint8_t>();
    int64_t const before = int64_t{v.steps[begin].scoreBegin} * v.kvHeads;
    int64_t const total = int64_t{v.steps[end - 1].scoreBegin + v.steps[end - 1].scoreItems} * v.kvHeads - before;
    int64_t const warp = (blockIdx.x * blockDim.x + threadIdx.x) / kWARP;
    int64_t const warps = int64_t{gridDim.x} * (blockDim.x / kWARP);
    int64_t const n = total * warp / warps;
    int32_t left = static_cast<int32_t>(total * (warp + 1) / warps - n);
    if (left <= 0)
    {
        afterPrevious();
        return;
    }
    uint8_t* const rings = shared + threadIdx.x / kWARP * S::kRING_BYTES;
    Place place = findPlace(v, begin, end, n); // of the newest copies
#pragma unroll
    for (int32_t i = 0; i < S::kAHEAD; ++i)
    {
        uint8_t* const ring = rings + i * S::kITEM_BYTES;
        bool const isThere = i < left;
        size_t index = 0;
        if (isThere)
        {
            if (i > 0)
            {
                advance(v, place);
            }
            index = copyFirst<L, D>(v, layer, place, ring);
        }
        commitCopies(); // an empty group keeps the count right
        if (isThere)
        {
            copyTile<L, D>(v, index, 1, ring);
        }
        commitCopies();
    }
    afterPrevious(); // now there is q
    letNextStart();  // the next rows' landmarks are on their way before the last of these are done
    Query<D, NT> query;
    int32_t queries = -1;
    int32_t offset = 0; // of the item in the ring
    for (size_t number = static_cast<size_t>(before + n); left > 0; ++number, --left)
    {
        constexpr int32_t kPENDING = S::kAHEAD * kTILES - 1;
        uint8_t* const ring = rings + offset;
        offset = offset == S::kRING_BYTES - S::kITEM_BYTES ? 0 : offset + S::kITEM_BYTES;
        bool const isMore = left > S::kAHEAD;
        if (isMore)
        {
            advance(v, place);
        }
        waitForCopies<kPENDING>();
        Meta const meta = *metaOf<L, D>(ring);
        if (meta.queries != queries)
        {
            queries = meta.queries;
            loadQuery<L, D>(v, q, queries, query);
        }
        float sums[kTILES][NT][4];
        scoreTile<L, D>(ring, 0, query, sums[0]);
        size_t index = 0;
        if (isMore)
        {
            index = copyFirst<L, D>(v, layer, place, ring);
        }
        commitCopies();
        waitForCopies<kPENDING>();
        scoreTile<L, D>(ring, 1, query, sums[1]);
        if (isMore)
        {
            copyTile<L, D>(v, index, 1, ring);
        }
        commitCopies();
        chunkLogits<S::kE4M3>(query.factors, meta.scale, sums);
        uint32_t const present = meta.published < kSCORE_CHUNKS ? (1U << meta.published) - 1U : kFULL_WARP;
        writeItem(v, number, present & ~meta.excluded, sums);
    }
}

} // namespace

cudaError_t scoreLandmarks(
    View const& view, int32_t layer, void const* q, int32_t begin, int32_t end, int32_t blocks, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    int32_t limit = 0;
    cudaError_t error = sharedMemoryLimit(limit);
    if (error != cudaSuccess)
    {
        return error;
    }
    auto const byGroup = [&](auto landmark, auto headSize) -> cudaError_t
    {
        using L = decltype(landmark);
        constexpr int32_t kD = decltype(headSize)::value;
        auto const kernel = view.group <= kMMA_HEADS ? scoreKernel<L, kD, 1> : scoreKernel<L, kD, 2>;
        // Half the warps where multiprocessors have little shared memory: their share of the memory's speed is smaller.
        constexpr int32_t kBYTES = kTHREADS / kWARP * Shape<L, kD>::kRING_BYTES;
        int32_t const part = kBYTES <= limit ? 1 : 2;
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBYTES / part);
        if (error == cudaSuccess)
        {
            error = launchEarly(view.startsEarly, kernel, dim3(static_cast<uint32_t>(blocks)), kTHREADS / part,
                kBYTES / part, stream, view, layer, q, begin, end);
        }
        return error;
    };
    return dispatchShape(view, [&](auto tag, auto headSize)
        { return view.landmarkFormat == Format::kE4M3 ? byGroup(__nv_fp8_e4m3{}, headSize) : byGroup(tag, headSize); });
}

} // namespace trtllm_shadowkv::kernels
