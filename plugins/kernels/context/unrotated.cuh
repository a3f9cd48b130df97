// Keys of a prompt before RoPE, from the live pages, which hold them after it.
//
// An item is 4 neighbouring elements of a token and head, the first a multiple of 4, and their RoPE partners, D / 2
// further.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{

struct Item
{
    uint2 own;
    uint2 partner;
};

// Page id of token p of a prompt, whose pages do not wrap.
__device__ __forceinline__ int32_t promptPage(View const& v, int32_t slot, int32_t p)
{
    return v.liveTable[size_t{static_cast<uint32_t>(slot)} * v.liveTableStride + p / kLIVE_PAGE_TOKENS];
}

// (cos, sin) of two frequencies: the product of a turn and a step as complex numbers.
__device__ __forceinline__ float4 compose(float4 turn, float4 step)
{
    return make_float4(turn.x * step.x - turn.y * step.y, turn.x * step.y + turn.y * step.x,
        turn.z * step.z - turn.w * step.w, turn.z * step.w + turn.w * step.z);
}

// Two elements and their partners, turned back by (cos, sin) and rounded.
template <typename T>
__device__ __forceinline__ void unrotatePair(uint32_t& own, uint32_t& partner, float4 angle)
{
    float2 const u = unpack<T>(own);
    float2 const v = unpack<T>(partner);
    own = pack<T>(u.x * angle.x + v.x * angle.y, u.y * angle.z + v.y * angle.w);
    partner = pack<T>(v.x * angle.x - u.x * angle.y, v.y * angle.z - u.y * angle.w);
}

// `low`: (cos, sin) of the item's first two elements; `high`: of the others.
template <typename T>
__device__ __forceinline__ Item unrotate(Item item, float4 low, float4 high)
{
    unrotatePair<T>(item.own.x, item.partner.x, low);
    unrotatePair<T>(item.own.y, item.partner.y, high);
    return item;
}

} // namespace trtllm_shadowkv::kernels
