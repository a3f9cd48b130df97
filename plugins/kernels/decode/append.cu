#include "kernels/decode/decode.h"

#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 128;

// A thread takes elements d to d + 3 of a head and their RoPE partners d + D / 2 to d + D / 2 + 3.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS) appendKernel(
    View const view, int32_t layer, T const* __restrict__ qkv, int32_t const* __restrict__ positions, T* __restrict__ q)
{
    constexpr int32_t kHALF = D / 2;
    constexpr int32_t kHEAD_THREADS = D / 8;
    letNextStart(); // the landmarks are on their way before there is q
    int32_t const b = static_cast<int32_t>(blockIdx.y);
    int32_t const item = static_cast<int32_t>(blockIdx.x) * kTHREADS + static_cast<int32_t>(threadIdx.x);
    int32_t const head = item / kHEAD_THREADS;
    int32_t const d = item % kHEAD_THREADS * 4;
    int32_t const heads = view.heads + 2 * view.kvHeads;
    if (head >= heads)
    {
        return;
    }
    int32_t const slot = view.steps[b].slot;
    Row const row = view.steps[b].row;
    int32_t const p = slot < 0 ? 0 : row.length - 1;
    if (item == 0 && positions[b] != p)
    {
        atomicOr(view.fault, kFAULT_POSITION);
    }
    T* const rotated = q + (size_t{static_cast<uint32_t>(b)} * view.heads + head) * D + d; // of a query head
    if (slot < 0)
    {
        if (head < view.heads)
        {
            *reinterpret_cast<uint2*>(rotated) = make_uint2(0, 0);
            *reinterpret_cast<uint2*>(rotated + kHALF) = make_uint2(0, 0);
        }
        return;
    }
    T const* const source = qkv + (size_t{static_cast<uint32_t>(b)} * heads + head) * D + d;
    uint2 const first = *reinterpret_cast<uint2 const*>(source);
    uint2 const second = *reinterpret_cast<uint2 const*>(source + kHALF);
    int32_t const kvHead = head - view.heads; // K heads, then V heads
    if (kvHead >= view.kvHeads)
    {
        int32_t const page = livePage(view, slot, row.ring, p);
        // As bits: T and its NaNs are copied, not converted.
        uint16_t* const unit
            = reinterpret_cast<uint16_t*>(liveValueUnit<T>(view, layer, page, kvHead - view.kvHeads, p)) + p % kUNIT;
        uint32_t const words[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
        for (int32_t j = 0; j < 4; ++j)
        {
            int32_t const at = d + j / 2 * kHALF + j % 2 * 2;
            unit[at * kUNIT] = static_cast<uint16_t>(words[j] & 0xffffU);
            unit[(at + 1) * kUNIT] = static_cast<uint16_t>(words[j] >> 16);
        }
        return;
    }
    T* target = rotated;
    if (kvHead >= 0)
    {
        target = liveKey<T>(view, layer, livePage(view, slot, row.ring, p), kvHead, p) + d;
    }
    uint2 turnedFirst;
    uint2 turnedSecond;
    auto const rotate = [](float4 angle, uint32_t x, uint32_t y, uint32_t& turnedX, uint32_t& turnedY)
    {
        float2 const u = unpack<T>(x);
        float2 const v = unpack<T>(y);
        turnedX = pack<T>(u.x * angle.x - v.x * angle.y, u.y * angle.z - v.y * angle.w);
        turnedY = pack<T>(v.x * angle.x + u.x * angle.y, v.y * angle.z + u.y * angle.w);
    };
    rotate(ropePair(view, p, d), first.x, second.x, turnedFirst.x, turnedSecond.x);
    rotate(ropePair(view, p, d + 2), first.y, second.y, turnedFirst.y, turnedSecond.y);
    *reinterpret_cast<uint2*>(target) = turnedFirst;
    *reinterpret_cast<uint2*>(target + kHALF) = turnedSecond;
}

} // namespace

cudaError_t appendTokens(View const& view, int32_t layer, void const* qkv, int32_t const* positions, void* q,
    int32_t batch, cudaStream_t stream)
{
    if (batch < 1 || batch > view.maxBatch || layer < 0 || layer >= view.layers)
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            constexpr int32_t kSIZE = decltype(size)::value;
            int32_t const items = (view.heads + 2 * view.kvHeads) * (kSIZE / 8);
            dim3 const grid((items + kTHREADS - 1) / kTHREADS, batch);
            auto const kernel = appendKernel<T, kSIZE>;
            return launch(kernel, grid, kTHREADS, 0, stream, view, layer, static_cast<T const*>(qkv), positions,
                static_cast<T*>(q));
        });
}

} // namespace trtllm_shadowkv::kernels
