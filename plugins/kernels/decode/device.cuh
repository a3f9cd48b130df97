// What kernels of a state share: conversions, addresses, reductions, dispatch by shape.
//
// Operands are read from global memory straight into the registers of mma.m16n8k16, without shared memory: a sum over k
// does not care about the order of k, so lane (g, t) = (lane / 4, lane % 4) takes 16 consecutive bytes of row g, which are
// the k columns of two steps, as long as the other operand's elements are taken in the same order.
#pragma once

#include "kernels/decode/view.h"
#include "kernels/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <type_traits>

namespace trtllm_shadowkv::kernels
{

// --- loads ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load16(void const* address)
{
    return *static_cast<uint4 const*>(address);
}

// --- conversions --------------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t v)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        return __half22float2(*reinterpret_cast<__half2*>(&v));
    }
    else
    {
        return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000U));
    }
}

// Two e4m3 (low byte first) to two f16; exact.
__device__ __forceinline__ uint32_t halvesOfE4m3(uint16_t v)
{
    __half2_raw const r = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(v), __NV_E4M3);
    return uint32_t{r.x} | uint32_t{r.y} << 16;
}

// --- addresses ----------------------------------------------------------------------------------------------------------

// Bytes of one live page of one layer.
__device__ __forceinline__ size_t livePageElements(View const& v)
{
    return size_t{2} * v.kvHeads * kLIVE_PAGE_TOKENS * v.headSize;
}

// Page id of token p.
__device__ __forceinline__ int32_t livePage(View const& v, int32_t slot, int32_t ring, int32_t p)
{
    int32_t index = p / kLIVE_PAGE_TOKENS;
    index = index < ring ? index : index % ring;
    return v.liveTable[size_t{static_cast<uint32_t>(slot)} * v.liveTableStride + index];
}

// Key [D] of token p of a page.
template <typename T>
__device__ __forceinline__ T* liveKey(View const& v, int32_t layer, int32_t page, int32_t head, int32_t p)
{
    return static_cast<T*>(v.live) + (size_t{static_cast<uint32_t>(layer)} * v.livePages + page) * livePageElements(v)
           + (size_t{static_cast<uint32_t>(head)} * kLIVE_PAGE_TOKENS + p % kLIVE_PAGE_TOKENS) * v.headSize;
}

// Values [D, 8] of the unit that holds token p of a page.
template <typename T>
__device__ __forceinline__ T* liveValueUnit(View const& v, int32_t layer, int32_t page, int32_t head, int32_t p)
{
    return static_cast<T*>(v.live) + (size_t{static_cast<uint32_t>(layer)} * v.livePages + page) * livePageElements(v)
           + (size_t{static_cast<uint32_t>(v.kvHeads + head)} * kLIVE_PAGE_TOKENS
                 + p % kLIVE_PAGE_TOKENS / kUNIT * kUNIT)
                 * v.headSize;
}

// Page id of sealed chunk c.
__device__ __forceinline__ int32_t sealedPage(View const& v, int32_t slot, int32_t chunk)
{
    return v.sealedTable[size_t{static_cast<uint32_t>(slot)} * v.sealedTableStride
                         + ((chunk << v.chunkShift) / kSEALED_PAGE_TOKENS)];
}

// Index of chunk c of a head in what is [layers, sealedPages, H, 512 / C]; `page` is the one that holds it.
__device__ __forceinline__ size_t pagedChunk(View const& v, int32_t layer, int32_t page, int32_t head, int32_t chunk)
{
    int32_t const perPage = kSEALED_PAGE_TOKENS >> v.chunkShift;
    return ((size_t{static_cast<uint32_t>(layer)} * v.sealedPages + page) * v.kvHeads + head) * perPage
           + (chunk & (perPage - 1));
}

// Index of a head in what is [layers, sealedRows, H].
__device__ __forceinline__ size_t sealedHead(View const& v, int32_t layer, int32_t sealedRow, int32_t head)
{
    return (size_t{static_cast<uint32_t>(layer)} * v.sealedRows + sealedRow) * v.kvHeads + head;
}

// (cos, sin) of token p for frequencies i, i + 1; i even.
__device__ __forceinline__ float4 ropePair(View const& v, int32_t p, int32_t i)
{
    int32_t const half = v.headSize / 2;
    float4 const turn
        = *reinterpret_cast<float4 const*>(v.ropeTurns + (size_t{static_cast<uint32_t>(p / kUNIT)} * half + i) * 2);
    float4 const step
        = *reinterpret_cast<float4 const*>(v.ropeSteps + (size_t{static_cast<uint32_t>(p % kUNIT)} * half + i) * 2);
    return make_float4(turn.x * step.x - turn.y * step.y, turn.x * step.y + turn.y * step.x,
        turn.z * step.z - turn.w * step.w, turn.z * step.w + turn.w * step.z);
}

// --- order and count ----------------------------------------------------------------------------------------------------

inline constexpr float kLOG2_E = 1.44269504088896341F;

// An unsigned number in the order of the floats (both zeros alike). No number has key 0.
__device__ __forceinline__ uint32_t keyOf(float x)
{
    uint32_t const bits = __float_as_uint(x + 0.0F);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
}

__device__ __forceinline__ uint32_t ones(uint32_t mask)
{
    return static_cast<uint32_t>(__popc(static_cast<int32_t>(mask)));
}

// --- reductions ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warpMax(float v)
{
#pragma unroll
    for (int32_t offset = 16; offset > 0; offset /= 2)
    {
        v = fmaxf(v, __shfl_xor_sync(kFULL_WARP, v, offset));
    }
    return v;
}

__device__ __forceinline__ float warpSum(float v)
{
#pragma unroll
    for (int32_t offset = 16; offset > 0; offset /= 2)
    {
        v += __shfl_xor_sync(kFULL_WARP, v, offset);
    }
    return v;
}

// --- launch -----------------------------------------------------------------------------------------------------------

inline cudaError_t attributeOfDevice(cudaDeviceAttr attribute, int32_t& value) // of the current one
{
    int32_t device = 0;
    cudaError_t const error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(&value, attribute, device);
}

// Bytes of shared memory that a block may have.
inline cudaError_t sharedMemoryLimit(int32_t& limit)
{
    return attributeOfDevice(cudaDevAttrMaxSharedMemoryPerBlockOptin, limit);
}

// --- dispatch -----------------------------------------------------------------------------------------------------------

// Calls f(type tag, integral constant of the head size).
template <typename F>
cudaError_t dispatchShape(View const& view, F&& f)
{
    auto const bySize = [&](auto tag) -> cudaError_t
    {
        switch (view.headSize)
        {
        case 64:
            return f(tag, std::integral_constant<int32_t, 64>{});
        case 96:
            return f(tag, std::integral_constant<int32_t, 96>{});
        case 128:
            return f(tag, std::integral_constant<int32_t, 128>{});
        default:
            return cudaErrorInvalidValue;
        }
    };
    return view.element == Element::kF16 ? bySize(__half{}) : bySize(__nv_bfloat16{});
}

} // namespace trtllm_shadowkv::kernels
