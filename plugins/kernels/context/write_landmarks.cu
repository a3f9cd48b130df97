#include "kernels/context/seal.cuh"
#include "kernels/decode/quantise.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 128;

// Sums of squares between these neither overflowed nor lost anything that counts.
constexpr float kLEAST_SQUARES = 0x1p-80F;
constexpr float kMOST_SQUARES = 0x1p100F;

// Lanes that work on a chunk, 8 elements each. Of D = 96, four are idle: they hold zeros.
template <int32_t D>
constexpr int32_t kLANES = D == 64 ? 8 : 16;

// --- reductions over kCOUNT neighbouring lanes -----------------------------------------------------------------------

template <int32_t kCOUNT>
__device__ __forceinline__ float lanesMax(float v)
{
#pragma unroll
    for (int32_t offset = kCOUNT / 2; offset > 0; offset /= 2)
    {
        v = fmaxf(v, __shfl_xor_sync(kFULL_WARP, v, offset));
    }
    return v;
}

template <int32_t kCOUNT>
__device__ __forceinline__ float lanesSum(float v)
{
#pragma unroll
    for (int32_t offset = kCOUNT / 2; offset > 0; offset /= 2)
    {
        v += __shfl_xor_sync(kFULL_WARP, v, offset);
    }
    return v;
}

// Of kVALUES values at once: each step halves the values that a lane holds. A lane is left with kVALUES / kCOUNT sums,
// or with one; every sum is in some lane.
template <int32_t kVALUES, int32_t kCOUNT, int32_t kALL>
__device__ __forceinline__ void lanesSums(float (&values)[kALL], int32_t lane)
{
    if constexpr (kCOUNT > 1)
    {
        constexpr int32_t kOFFSET = kCOUNT / 2;
        constexpr int32_t kHALF = kVALUES / 2;
        if constexpr (kHALF > 0)
        {
            bool const isUpper = (lane & kOFFSET) != 0;
#pragma unroll
            for (int32_t i = 0; i < kHALF; ++i)
            {
                float const kept = isUpper ? values[i + kHALF] : values[i];
                float const given = isUpper ? values[i] : values[i + kHALF];
                values[i] = kept + __shfl_xor_sync(kFULL_WARP, given, kOFFSET);
            }
        }
        else
        {
            values[0] += __shfl_xor_sync(kFULL_WARP, values[0], kOFFSET);
        }
        lanesSums<(kHALF > 0 ? kHALF : 1), kOFFSET>(values, lane);
    }
}

// Whether a flag is set in one of the kCOUNT lanes.
template <int32_t kCOUNT>
__device__ __forceinline__ bool lanesAny(bool flag)
{
    uint32_t const first = threadIdx.x % 32 / kCOUNT * kCOUNT;
    return (__ballot_sync(kFULL_WARP, flag) >> first & ((1U << kCOUNT) - 1U)) != 0;
}

// --- least cosine ----------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void unpackAll(uint4 v, float (&x)[8])
{
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int32_t j = 0; j < 4; ++j)
    {
        float2 const pair = unpack<T>(words[j]);
        x[2 * j] = pair.x;
        x[2 * j + 1] = pair.y;
    }
}

// A power of two that makes the square of a vector whose largest magnitude is amax neither overflow nor vanish.
__device__ __forceinline__ float saneScale(float amax)
{
    return amax > 0x1p40F ? 0x1p-80F : amax < 0x1p-40F ? 0x1p96F : 1.0F;
}

// For vectors of any magnitude: each is scaled by itself. Called by whole warps; `keys` is the lane's first element,
// null where it has none.
template <typename T, int32_t D, int32_t C>
__device__ __noinline__ float scaledLeastCosine(T const* keys, float4 meanLow, float4 meanHigh)
{
    constexpr int32_t kCOUNT = kLANES<D>;
    float mean[8] = {meanLow.x, meanLow.y, meanLow.z, meanLow.w, meanHigh.x, meanHigh.y, meanHigh.z, meanHigh.w};
    float amax = 0.0F;
    bool isFinite = true;
#pragma unroll
    for (int32_t j = 0; j < 8; ++j)
    {
        amax = fmaxf(amax, fabsf(mean[j]));
        isFinite = isFinite && fabsf(mean[j]) < INFINITY;
    }
    bool const isUseless = lanesAny<kCOUNT>(!isFinite); // so it is wherever a key is not finite
    float const meanScale = saneScale(lanesMax<kCOUNT>(amax));
    float meanSquares = 0.0F;
#pragma unroll
    for (int32_t j = 0; j < 8; ++j)
    {
        mean[j] *= meanScale;
        meanSquares += mean[j] * mean[j];
    }
    meanSquares = lanesSum<kCOUNT>(meanSquares);
    float least = 1.0F;
#pragma unroll 1
    for (int32_t c = 0; c < C; ++c)
    {
        uint4 data = make_uint4(0, 0, 0, 0);
        if (keys != nullptr)
        {
            data = load16(keys + c * D);
        }
        float key[8];
        unpackAll<T>(data, key);
        float const scale = saneScale(lanesMax<kCOUNT>(largestOf<T>(data, 0.0F)));
        float dot = 0.0F;
        float squares = 0.0F;
#pragma unroll
        for (int32_t j = 0; j < 8; ++j)
        {
            key[j] *= scale;
            dot += key[j] * mean[j];
            squares += key[j] * key[j];
        }
        dot = lanesSum<kCOUNT>(dot);
        squares = lanesSum<kCOUNT>(squares);
        bool const isDirected = squares > 0.0F && meanSquares > 0.0F;
        least = fminf(least, isDirected ? dot / (sqrtf(squares) * sqrtf(meanSquares)) : -1.0F);
    }
    return isUseless ? -1.0F : least;
}

// --- kernel ----------------------------------------------------------------------------------------------------------

// The lane's 8 elements of landmark `place` (pagedChunk()): the bits that sealChunks() would write.
template <typename T, int32_t D>
__device__ __forceinline__ void storeLandmark(
    View const& view, float (&mean)[8], size_t place, size_t centre, int32_t lane, bool isActive)
{
    int32_t const d = lane * 8;
    if (view.landmarkFormat == Format::kELEMENT)
    {
        if (isActive)
        {
            *reinterpret_cast<uint4*>(static_cast<T*>(view.landmarks) + place * D + d)
                = make_uint4(pack<T>(mean[0], mean[1]), pack<T>(mean[2], mean[3]), pack<T>(mean[4], mean[5]),
                    pack<T>(mean[6], mean[7]));
        }
        return;
    }
    float amax = 0.0F;
    if (isActive)
    {
#pragma unroll
        for (int32_t j = 0; j < 8; ++j)
        {
            mean[j] -= view.centres[centre * D + d + j];
            amax = fmaxf(amax, fabsf(mean[j])); // passes over NaN
        }
    }
    float const scale = e4m3Scale(lanesMax<kLANES<D>>(amax));
    auto const packFour = [&](int32_t j)
    {
        return packE4m3(make_float2(mean[j], mean[j + 1]), scale)
               | packE4m3(make_float2(mean[j + 2], mean[j + 3]), scale) << 16;
    };
    if (isActive)
    {
        *reinterpret_cast<uint2*>(static_cast<uint8_t*>(view.landmarks) + place * D + d)
            = make_uint2(packFour(0), packFour(4));
        if (lane == 0)
        {
            view.landmarkScales[place] = scale;
        }
    }
}

// Grid (chunks, KV heads, layers); kLANES lanes take a chunk.
template <typename T, int32_t D, int32_t C>
__global__ void __launch_bounds__(kTHREADS)
    landmarkKernel(__grid_constant__ View const view, Seal const seal, SealLayout const layout)
{
    constexpr int32_t kCOUNT = kLANES<D>;
    constexpr int32_t kCHUNKS = kTHREADS / kCOUNT;
    constexpr int32_t kLEFT = C > kCOUNT ? C / kCOUNT : 1; // sums that a lane is left with
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const lane = thread % kCOUNT;
    int32_t const chunk = static_cast<int32_t>(blockIdx.x) * kCHUNKS + thread / kCOUNT;
    int32_t const head = static_cast<int32_t>(blockIdx.y);
    int32_t const index = static_cast<int32_t>(blockIdx.z);
    int32_t const layer = seal.layerBegin + index;
    bool const isChunk = chunk < seal.chunks;
    bool const isActive = isChunk && lane * 8 < D;
    T const* keys = nullptr;
    uint4 data[C];
#pragma unroll
    for (int32_t c = 0; c < C; ++c)
    {
        data[c] = make_uint4(0, 0, 0, 0);
    }
    if (isActive)
    {
        int32_t const page = livePage(view, seal.slot, view.rows[seal.slot].ring, chunk * C);
        keys = liveKey<T>(view, layer, page, head, chunk * C) + lane * 8;
#pragma unroll
        for (int32_t c = 0; c < C; ++c)
        {
            data[c] = loadStream(keys + c * D);
        }
    }
    float mean[8] = {};
#pragma unroll
    for (int32_t c = 0; c < C; ++c)
    {
        float key[8];
        unpackAll<T>(data[c], key);
#pragma unroll
        for (int32_t j = 0; j < 8; ++j)
        {
            mean[j] += key[j];
        }
    }
    float meanSquares = 0.0F;
#pragma unroll
    for (int32_t j = 0; j < 8; ++j)
    {
        mean[j] *= 1.0F / C; // a power of two: exact
        meanSquares += mean[j] * mean[j];
    }
    float dots[C];
    float squares[C];
#pragma unroll
    for (int32_t c = 0; c < C; ++c)
    {
        float key[8];
        unpackAll<T>(data[c], key);
        dots[c] = 0.0F;
        squares[c] = 0.0F;
#pragma unroll
        for (int32_t j = 0; j < 8; ++j)
        {
            dots[c] += key[j] * mean[j];
            squares[c] += key[j] * key[j];
        }
    }
    lanesSums<C, kCOUNT>(dots, lane);
    lanesSums<C, kCOUNT>(squares, lane);
    meanSquares = lanesSum<kCOUNT>(meanSquares);
    auto const isSane = [](float sum) { return sum >= kLEAST_SQUARES && sum <= kMOST_SQUARES; }; // NaN is not
    bool isPlain = isSane(meanSquares);
    float negated = -1.0F;
#pragma unroll
    for (int32_t i = 0; i < kLEFT; ++i)
    {
        isPlain = isPlain && isSane(squares[i]);
        negated = fmaxf(negated, -dots[i] / (sqrtf(squares[i]) * sqrtf(meanSquares)));
    }
    float least = -lanesMax<kCOUNT>(negated);
    bool const isOdd = lanesAny<kCOUNT>(isChunk && !isPlain);
    if (__any_sync(kFULL_WARP, isOdd))
    {
        float const scaled = scaledLeastCosine<T, D, C>(
            keys, make_float4(mean[0], mean[1], mean[2], mean[3]), make_float4(mean[4], mean[5], mean[6], mean[7]));
        least = isOdd ? scaled : least;
    }
    if (isChunk && lane == 0)
    {
        scratchOf<float>(seal, layout, index, layout.cosines)[int64_t{head} * seal.chunks + chunk]
            = fmaxf(-1.0F, fminf(1.0F, least));
    }
    size_t const place = isChunk ? pagedChunk(view, layer, sealedPage(view, seal.slot, chunk), head, chunk) : size_t{0};
    storeLandmark<T, D>(view, mean, place, sealedHead(view, layer, seal.sealedRow, head), lane, isActive);
}

template <typename T, int32_t D, int32_t C>
cudaError_t launchLandmarks(View const& view, Seal const& seal, cudaStream_t stream)
{
    constexpr int32_t kCHUNKS = kTHREADS / kLANES<D>;
    dim3 const grid(static_cast<uint32_t>((seal.chunks + kCHUNKS - 1) / kCHUNKS), static_cast<uint32_t>(view.kvHeads),
        static_cast<uint32_t>(seal.layerEnd - seal.layerBegin));
    return launch(landmarkKernel<T, D, C>, grid, kTHREADS, 0, stream, view, seal, sealLayout(view, seal.chunks));
}

} // namespace

cudaError_t writeLandmarks(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            constexpr int32_t kSIZE = decltype(size)::value;
            return view.chunkSize == 8 ? launchLandmarks<T, kSIZE, 8>(view, seal, stream)
                                       : launchLandmarks<T, kSIZE, 16>(view, seal, stream);
        });
}

} // namespace trtllm_shadowkv::kernels
