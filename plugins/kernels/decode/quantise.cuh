// Numbers as e4m3, with a float32 scale for those that share one.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{

inline constexpr float kE4M3_MAX = 448.0F;

// Scale of numbers whose largest magnitude is amax.
__device__ __forceinline__ float e4m3Scale(float amax)
{
    float const scale = amax / kE4M3_MAX;
    return scale > 0.0F ? scale : 1.0F;
}

// Two e4m3, the first in the low byte; saturating, NaN stays NaN. True divisions: the oracle's bits.
__device__ __forceinline__ uint32_t packE4m3(float2 v, float scale)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(v.x / scale, v.y / scale), __NV_SATFINITE, __NV_E4M3);
}

// The same of 8 elements T.
template <typename T>
__device__ __forceinline__ uint2 packE4m3(uint4 v, float scale)
{
    return make_uint2(packE4m3(unpack<T>(v.x), scale) | packE4m3(unpack<T>(v.y), scale) << 16,
        packE4m3(unpack<T>(v.z), scale) | packE4m3(unpack<T>(v.w), scale) << 16);
}

// Largest magnitude of 8 elements T, or `amax` if that is larger; passes over NaN.
template <typename T>
__device__ __forceinline__ float largestOf(uint4 v, float amax)
{
    uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int32_t j = 0; j < 4; ++j)
    {
        float2 const pair = unpack<T>(words[j]);
        amax = fmaxf(amax, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    return amax;
}

} // namespace trtllm_shadowkv::kernels
