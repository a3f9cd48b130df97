#include "kernels/context/stretch.h"

#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

#include <algorithm>

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kHEADS_AT_ONCE = 4;        // that a block handles at a time, of the tokens of one unit
constexpr int32_t kPIECE = 8;                // elements of a load or store of 16 bytes
constexpr int32_t kBLOCKS_PER_PROCESSOR = 8; // there are at least as many, if the stretch has as many heads and units

// Of a head size: 4 heads of 8 tokens, each in pieces and their RoPE partners; or of 4 heads pairs of dimensions.
template <int32_t D>
constexpr int32_t kTHREADS = kHEADS_AT_ONCE * kUNIT * D / (2 * kPIECE);
static_assert(kTHREADS<128> == kHEADS_AT_ONCE * 128 / 2, "one thread a pair of dimensions");

template <typename T>
__device__ __forceinline__ void rotate(float4 angle, uint32_t& x, uint32_t& y)
{
    float2 const u = unpack<T>(x);
    float2 const v = unpack<T>(y);
    x = pack<T>(u.x * angle.x - v.x * angle.y, u.y * angle.z - v.y * angle.w);
    y = pack<T>(v.x * angle.x + u.x * angle.y, v.y * angle.z + u.y * angle.w);
}

// Q and K heads of the unit at position `first`, `page` its page. A thread keeps its token and dimensions, so that it
// needs the angles once; the next head is on its way while one is rotated.
template <typename T, int32_t D>
__device__ __forceinline__ void appendKeys(View const& view, int32_t layer, Stretch const& stretch, int32_t first,
    int32_t page, T const* __restrict__ qkv, T* __restrict__ q)
{
    constexpr int32_t kHALF = D / 2;
    constexpr int32_t kPIECES = kHALF / kPIECE;
    int32_t const d = static_cast<int32_t>(threadIdx.x) % kPIECES * kPIECE;
    int32_t const p = first + static_cast<int32_t>(threadIdx.x) / kPIECES % kUNIT;
    int32_t const i = p - stretch.start;
    if (i < 0 || i >= stretch.length)
    {
        return;
    }
    float4 angles[kPIECE / 2];
#pragma unroll
    for (int32_t j = 0; j < kPIECE / 2; ++j)
    {
        angles[j] = ropePair(view, p, d + 2 * j);
    }
    int32_t const width = view.heads + 2 * view.kvHeads;
    int32_t const end = view.heads + view.kvHeads;
    int32_t const stride = static_cast<int32_t>(gridDim.y) * kHEADS_AT_ONCE;
    T const* const source = qkv + size_t{static_cast<uint32_t>(i)} * width * D + d;
    int32_t head
        = static_cast<int32_t>(blockIdx.y) * kHEADS_AT_ONCE + static_cast<int32_t>(threadIdx.x) / (kPIECES * kUNIT);
    uint4 nextX{};
    uint4 nextY{};
    if (head < end)
    {
        nextX = load16(source + head * D);
        nextY = load16(source + head * D + kHALF);
    }
    for (; head < end; head += stride)
    {
        uint4 x = nextX;
        uint4 y = nextY;
        if (head + stride < end)
        {
            nextX = load16(source + (head + stride) * D);
            nextY = load16(source + (head + stride) * D + kHALF);
        }
        rotate<T>(angles[0], x.x, y.x);
        rotate<T>(angles[1], x.y, y.y);
        rotate<T>(angles[2], x.z, y.z);
        rotate<T>(angles[3], x.w, y.w);
        T* const to = head < view.heads ? q + (size_t{static_cast<uint32_t>(i)} * view.heads + head) * D + d
                                        : liveKey<T>(view, layer, page, head - view.heads, p) + d;
        *reinterpret_cast<uint4*>(to) = x;
        *reinterpret_cast<uint4*>(to + kHALF) = y;
    }
}

// V heads. A thread takes two dimensions of all tokens of the unit. As bits: T and its NaNs are copied, not converted.
template <typename T, int32_t D>
__device__ __forceinline__ void appendValues(
    View const& view, int32_t layer, Stretch const& stretch, int32_t first, int32_t page, T const* __restrict__ qkv)
{
    int32_t const d = static_cast<int32_t>(threadIdx.x) % (D / 2) * 2;
    int32_t const width = view.heads + 2 * view.kvHeads;
    int32_t const i = first - stretch.start; // negative in a unit that begins in the stretch before
    bool const isWhole = i >= 0 && i + kUNIT <= stretch.length;
    int32_t const stride = static_cast<int32_t>(gridDim.y) * kHEADS_AT_ONCE;
    // Blocks that have one head fewer of Q and K begin.
    int32_t const begun = (view.heads + view.kvHeads + kHEADS_AT_ONCE - 1) / kHEADS_AT_ONCE;
    int32_t const parts = static_cast<int32_t>(gridDim.y);
    int32_t const turn = (static_cast<int32_t>(blockIdx.y) + parts - begun % parts) % parts;
    for (int32_t head = turn * kHEADS_AT_ONCE + static_cast<int32_t>(threadIdx.x) / (D / 2); head < view.kvHeads;
        head += stride)
    {
        T const* const source = qkv + (size_t{static_cast<uint32_t>(view.heads + view.kvHeads + head)}) * D + d;
        uint32_t words[kUNIT];
#pragma unroll
        for (int32_t j = 0; j < kUNIT; ++j)
        {
            int32_t const token = min(max(i + j, 0), stretch.length - 1);
            words[j] = *reinterpret_cast<uint32_t const*>(source + size_t{static_cast<uint32_t>(token)} * width * D);
        }
        T* const unit = liveValueUnit<T>(view, layer, page, head, first) + d * kUNIT;
        if (isWhole)
        {
            uint32_t low[kUNIT / 2];
            uint32_t high[kUNIT / 2];
#pragma unroll
            for (int32_t j = 0; j < kUNIT / 2; ++j)
            {
                low[j] = (words[2 * j] & 0xffffU) | words[2 * j + 1] << 16;
                high[j] = words[2 * j] >> 16 | (words[2 * j + 1] & 0xffff0000U);
            }
            *reinterpret_cast<uint4*>(unit) = make_uint4(low[0], low[1], low[2], low[3]);
            *reinterpret_cast<uint4*>(unit + kUNIT) = make_uint4(high[0], high[1], high[2], high[3]);
        }
        else
        {
            uint16_t* const elements = reinterpret_cast<uint16_t*>(unit);
#pragma unroll
            for (int32_t j = 0; j < kUNIT; ++j)
            {
                if (i + j >= 0 && i + j < stretch.length)
                {
                    elements[j] = static_cast<uint16_t>(words[j] & 0xffffU);
                    elements[kUNIT + j] = static_cast<uint16_t>(words[j] >> 16);
                }
            }
        }
    }
}

// Block x: the tokens of one unit; y: every gridDim.y-th four heads.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS<D>) appendStretchKernel(__grid_constant__ View const view, int32_t layer,
    Stretch const stretch, T const* __restrict__ qkv, int32_t const* __restrict__ positions, T* __restrict__ q)
{
    int32_t const first = (stretch.start / kUNIT + static_cast<int32_t>(blockIdx.x)) * kUNIT;
    int32_t const page = livePage(view, stretch.slot, view.liveTableStride, first);
    if (blockIdx.y == 0 && threadIdx.x < kUNIT)
    {
        int32_t const p = first + static_cast<int32_t>(threadIdx.x);
        int32_t const i = p - stretch.start;
        if (i >= 0 && i < stretch.length && positions[i] != p)
        {
            atomicOr(view.fault, kFAULT_POSITION);
        }
    }
    appendKeys<T, D>(view, layer, stretch, first, page, qkv, q);
    appendValues<T, D>(view, layer, stretch, first, page, qkv);
}

} // namespace

cudaError_t appendStretch(View const& view, int32_t layer, Stretch const& stretch, void const* qkv,
    int32_t const* positions, void* q, cudaStream_t stream)
{
    if (!isValid(view, layer, stretch))
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            constexpr int32_t kSIZE = decltype(size)::value;
            int32_t const units = (stretch.start + stretch.length - 1) / kUNIT - stretch.start / kUNIT + 1;
            int32_t const parts = (view.heads + 2 * view.kvHeads + kHEADS_AT_ONCE - 1) / kHEADS_AT_ONCE;
            int32_t const wanted = (kBLOCKS_PER_PROCESSOR * view.multiprocessors + units - 1) / units;
            dim3 const grid(static_cast<uint32_t>(units), static_cast<uint32_t>(std::clamp(wanted, 1, parts)));
            auto const kernel = appendStretchKernel<T, kSIZE>;
            return launch(kernel, grid, kTHREADS<kSIZE>, 0, stream, view, layer, stretch, static_cast<T const*>(qkv),
                positions, static_cast<T*>(q));
        });
}

} // namespace trtllm_shadowkv::kernels
