#include "kernels/context/seal.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kBLOCK_TOKENS = 32;
constexpr int32_t kHEADS = 4; // that a thread reads before it writes the first

// Two elements and their RoPE partners, turned back by (cos, sin) and rounded.
template <typename T>
__device__ __forceinline__ void unrotatePair(uint32_t& own, uint32_t& partner, float4 angle)
{
    float2 const u = unpack<T>(own);
    float2 const v = unpack<T>(partner);
    own = pack<T>(u.x * angle.x + v.x * angle.y, u.y * angle.z + v.y * angle.w);
    partner = pack<T>(v.x * angle.x - u.x * angle.y, v.y * angle.z - u.y * angle.w);
}

// Whether one of two elements is not finite.
template <typename T>
__device__ __forceinline__ bool isWrong(uint32_t pair)
{
    constexpr uint32_t kEXPONENT = std::is_same_v<T, __nv_bfloat16> ? 0x7f80U : 0x7c00U;
    return (pair & kEXPONENT) == kEXPONENT || (pair >> 16 & kEXPONENT) == kEXPONENT;
}

// 8 elements from `key` on and their partners, of neighbouring heads. Returns whether one is not finite, be it because
// it was not, or does not fit the type.
template <typename T, int32_t D, int32_t HEADS>
__device__ __forceinline__ bool unrotateHeads(T* key, float4 const (&angles)[4])
{
    bool wrong = false;
    uint4 own[HEADS];
    uint4 partner[HEADS];
#pragma unroll
    for (int32_t h = 0; h < HEADS; ++h)
    {
        own[h] = loadStream(key + h * kLIVE_PAGE_TOKENS * D);
        partner[h] = loadStream(key + h * kLIVE_PAGE_TOKENS * D + D / 2);
    }
#pragma unroll
    for (int32_t h = 0; h < HEADS; ++h)
    {
        unrotatePair<T>(own[h].x, partner[h].x, angles[0]);
        unrotatePair<T>(own[h].y, partner[h].y, angles[1]);
        unrotatePair<T>(own[h].z, partner[h].z, angles[2]);
        unrotatePair<T>(own[h].w, partner[h].w, angles[3]);
        *reinterpret_cast<uint4*>(key + h * kLIVE_PAGE_TOKENS * D) = own[h];
        *reinterpret_cast<uint4*>(key + h * kLIVE_PAGE_TOKENS * D + D / 2) = partner[h];
        for (uint4 const v : {own[h], partner[h]})
        {
            wrong = wrong || isWrong<T>(v.x) || isWrong<T>(v.y) || isWrong<T>(v.z) || isWrong<T>(v.w);
        }
    }
    return wrong;
}

// Block (kBLOCK_TOKENS tokens, layer): a thread's elements and partners of one token, of all heads by the same angles.
template <typename T, int32_t D>
__global__ void __launch_bounds__(2 * D) unrotateKernel(__grid_constant__ View const view, Seal const seal)
{
    constexpr int32_t kPIECES = D / 16; // of 8 elements before D / 2
    static_assert(kBLOCK_TOKENS * kPIECES == 2 * D);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const p = static_cast<int32_t>(blockIdx.x) * kBLOCK_TOKENS + thread / kPIECES;
    if (p >= seal.chunks << view.chunkShift)
    {
        return;
    }
    int32_t const d = thread % kPIECES * 8;
    int32_t const layer = seal.layerBegin + static_cast<int32_t>(blockIdx.y);
    T* key = liveKey<T>(view, layer, promptPage(view, seal.slot, p), 0, p) + d;
    float4 angles[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
    {
        angles[i] = ropePair(view, p, d + 2 * i);
    }
    bool wrong = false;
    int32_t left = view.kvHeads;
    for (; left >= kHEADS; left -= kHEADS)
    {
        wrong |= unrotateHeads<T, D, kHEADS>(key, angles);
        key += kHEADS * kLIVE_PAGE_TOKENS * D;
    }
    for (; left > 0; --left)
    {
        wrong |= unrotateHeads<T, D, 1>(key, angles);
        key += kLIVE_PAGE_TOKENS * D;
    }
    if (wrong)
    {
        atomicOr(view.fault, kFAULT_KEYS);
    }
}

} // namespace

cudaError_t unrotateKeys(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size)
        {
            constexpr int32_t kD = decltype(size)::value;
            int32_t const tokens = seal.chunks << view.chunkShift;
            dim3 const grid(static_cast<uint32_t>((tokens + kBLOCK_TOKENS - 1) / kBLOCK_TOKENS),
                static_cast<uint32_t>(seal.layerEnd - seal.layerBegin));
            return launch(unrotateKernel<decltype(tag), kD>, grid, 2 * kD, 0, stream, view, seal);
        });
}

} // namespace trtllm_shadowkv::kernels
