#include "kernels/context/seal.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kROWS = 16;                         // tokens that a block reads side by side
constexpr int32_t kLOADS = kLIVE_PAGE_TOKENS / kROWS; // 16-byte loads of a thread in a page, all in flight
constexpr int32_t kCLEAR_THREADS = 256;
constexpr uint32_t kINFINITY_BITS = 0x7f800000U;

// A sum over up to 2^21 keys as large as they can be must be finite, and tiny keys must not vanish: each stage of the
// sum is divided by as many terms as it can have.
constexpr float kKEY_SHARE = 1.0F / 4096;
constexpr float kROW_SHARE = 1.0F / kROWS;
constexpr float kPART_SHARE = 1.0F / kMEASURE_BLOCKS;
constexpr float kWHOLE = 4096.0F * kROWS * kMEASURE_BLOCKS;
static_assert(kMAX_TOKENS / kMEASURE_BLOCKS / kROWS <= 4096);

// Two keys: bits of the largest magnitude, where NaN is above infinity, and sums, to which what is not finite adds 0.
template <typename T>
__device__ __forceinline__ void measure(uint32_t word, float& first, float& second, uint32_t& largest)
{
    float2 const keys = unpack<T>(word);
    uint32_t const a = __float_as_uint(fabsf(keys.x));
    uint32_t const b = __float_as_uint(fabsf(keys.y));
    largest = max(largest, max(a, b));
    first = fmaf(a < kINFINITY_BITS ? keys.x : 0.0F, kKEY_SHARE, first);
    second = fmaf(b < kINFINITY_BITS ? keys.y : 0.0F, kKEY_SHARE, second);
}

__global__ void __launch_bounds__(kCLEAR_THREADS) clearKernel(Seal const seal, SealLayout const layout)
{
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < seal.layerEnd - seal.layerBegin; i += kCLEAR_THREADS)
    {
        *scratchOf<uint32_t>(seal, layout, i, layout.largest) = 0;
    }
}

// Block (part, KV head, layer): the keys of a range of pages that depends on the number of chunks alone. 2 D threads,
// so that kROWS tokens are read at a time whatever D is.
template <typename T, int32_t D>
__global__ void __launch_bounds__(2 * D)
    measureKernel(__grid_constant__ View const view, Seal const seal, SealLayout const layout)
{
    constexpr int32_t kPIECES = D / 8;
    static_assert(kROWS * kPIECES == 2 * D);
    __shared__ __align__(16) float rows[kROWS][D];
    __shared__ uint32_t warpLargest[2 * D / 32];
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const row = thread / kPIECES;
    int32_t const d = thread % kPIECES * 8;
    int32_t const part = static_cast<int32_t>(blockIdx.x);
    int32_t const head = static_cast<int32_t>(blockIdx.y);
    int32_t const index = static_cast<int32_t>(blockIdx.z);
    int32_t const ring = view.rows[seal.slot].ring;
    int32_t const tokens = seal.chunks << view.chunkShift;
    int32_t const pages = (tokens + kLIVE_PAGE_TOKENS - 1) / kLIVE_PAGE_TOKENS;
    int32_t const share = (pages + kMEASURE_BLOCKS - 1) / kMEASURE_BLOCKS;
    int32_t const begin = part * share;
    int32_t const end = min(begin + share, pages);
    float sums[8] = {};
    uint32_t largest = 0;
    int32_t next = begin < end ? livePage(view, seal.slot, ring, begin * kLIVE_PAGE_TOKENS) : 0;
    for (int32_t p = begin; p < end; ++p)
    {
        T const* const keys = liveKey<T>(view, seal.layerBegin + index, next, head, row) + d;
        if (p + 1 < end)
        {
            next = livePage(view, seal.slot, ring, (p + 1) * kLIVE_PAGE_TOKENS);
        }
        int32_t const left = tokens - p * kLIVE_PAGE_TOKENS - row;
        // Two ways, so that the loads of a whole page do not hang on its length: all are in flight before the first is
        // used.
        uint4 data[kLOADS];
        if (left > (kLOADS - 1) * kROWS)
        {
#pragma unroll
            for (int32_t k = 0; k < kLOADS; ++k)
            {
                data[k] = loadStream(keys + k * kROWS * D);
            }
        }
        else
        {
#pragma unroll
            for (int32_t k = 0; k < kLOADS; ++k)
            {
                data[k] = make_uint4(0, 0, 0, 0);
                if (k * kROWS < left)
                {
                    data[k] = loadStream(keys + k * kROWS * D);
                }
            }
        }
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            measure<T>(data[k].x, sums[0], sums[1], largest);
            measure<T>(data[k].y, sums[2], sums[3], largest);
            measure<T>(data[k].z, sums[4], sums[5], largest);
            measure<T>(data[k].w, sums[6], sums[7], largest);
        }
    }
    *reinterpret_cast<float4*>(&rows[row][d]) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    *reinterpret_cast<float4*>(&rows[row][d + 4]) = make_float4(sums[4], sums[5], sums[6], sums[7]);
    largest = __reduce_max_sync(kFULL_WARP, largest);
    if (thread % 32 == 0)
    {
        warpLargest[thread / 32] = largest;
    }
    __syncthreads();
    if (thread < D)
    {
        float sum = 0.0F;
#pragma unroll
        for (int32_t r = 0; r < kROWS; ++r)
        {
            sum += rows[r][thread] * kROW_SHARE;
        }
        scratchOf<float>(seal, layout, index, layout.sums)[(head * kMEASURE_BLOCKS + part) * D + thread] = sum;
    }
    if (thread == 0)
    {
        for (int32_t w = 1; w < 2 * D / 32; ++w)
        {
            largest = max(largest, warpLargest[w]);
        }
        atomicMax(scratchOf<uint32_t>(seal, layout, index, layout.largest), largest);
    }
}

// Block (KV head, layer), D threads.
template <int32_t D>
__global__ void __launch_bounds__(D)
    centreKernel(__grid_constant__ View const view, Seal const seal, SealLayout const layout)
{
    int32_t const d = static_cast<int32_t>(threadIdx.x);
    int32_t const head = static_cast<int32_t>(blockIdx.x);
    int32_t const index = static_cast<int32_t>(blockIdx.y);
    float const* const parts = scratchOf<float>(seal, layout, index, layout.sums) + head * kMEASURE_BLOCKS * D + d;
    float sum = 0.0F;
#pragma unroll 16
    for (int32_t part = 0; part < kMEASURE_BLOCKS; ++part)
    {
        sum += parts[part * D] * kPART_SHARE;
    }
    float const factor = kWHOLE / static_cast<float>(seal.chunks << view.chunkShift);
    view.centres[sealedHead(view, seal.layerBegin + index, seal.sealedRow, head) * D + d] = sum * factor;
}

} // namespace

cudaError_t measureKeys(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    SealLayout const layout = sealLayout(view, seal.chunks);
    cudaError_t const error = launch(clearKernel, dim3(1), kCLEAR_THREADS, 0, stream, seal, layout);
    if (error != cudaSuccess)
    {
        return error;
    }
    uint32_t const heads = static_cast<uint32_t>(view.kvHeads);
    uint32_t const layers = static_cast<uint32_t>(seal.layerEnd - seal.layerBegin);
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            constexpr int32_t kSIZE = decltype(size)::value;
            cudaError_t const measured = launch(measureKernel<decltype(tag), kSIZE>,
                dim3(kMEASURE_BLOCKS, heads, layers), 2 * kSIZE, 0, stream, view, seal, layout);
            if (measured != cudaSuccess || view.centres == nullptr)
            {
                return measured;
            }
            return launch(centreKernel<kSIZE>, dim3(heads, layers), kSIZE, 0, stream, view, seal, layout);
        });
}

} // namespace trtllm_shadowkv::kernels
