#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

#include "kernels/decode/quantise.cuh"
#include "kernels/decode/scan.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 512;
constexpr int32_t kWARPS = kTHREADS / 32;
constexpr int32_t kMAX_BLOCKS = 16;
constexpr int32_t kTILE = 8192;    // floats of shared memory
constexpr int32_t kROWS_AHEAD = 8; // rows of B that a thread has in flight

// --- A rows ----------------------------------------------------------------------------------------------------------

// The chunk's keys of the heads from `firstHead` on, un-rotated, as tile[(head, d)][c]. Returns the thread's sum of
// their squares.
template <typename T, int32_t D, int32_t C>
__device__ __forceinline__ float unrotateKeys(
    View const& view, int32_t layer, StepRow const& step, int32_t firstHead, int32_t heads, float* tile)
{
    constexpr int32_t kHALF = D / 2;
    int32_t const p = step.row.sealing * C;
    int32_t const page = livePage(view, step.slot, step.row.ring, p); // pages hold whole chunks
    float squares = 0.0F;
    // An item is 4 elements of a token and head, and their RoPE partners.
    for (int32_t item = static_cast<int32_t>(threadIdx.x); item < heads * (D / 8) * C; item += kTHREADS)
    {
        int32_t const c = item % C;
        int32_t const head = item / C / (D / 8);
        int32_t const d = item / C % (D / 8) * 4;
        T const* const key = liveKey<T>(view, layer, page, firstHead + head, p + c) + d;
        uint2 const first = *reinterpret_cast<uint2 const*>(key);
        uint2 const second = *reinterpret_cast<uint2 const*>(key + kHALF);
        float* const target = tile + (head * D + d) * C + c;
        auto const unrotate = [&](float4 angle, uint32_t x, uint32_t y, int32_t j)
        {
            float2 const u = unpack<T>(x);
            float2 const v = unpack<T>(y);
            float4 const turned = make_float4(u.x * angle.x + v.x * angle.y, u.y * angle.z + v.y * angle.w,
                v.x * angle.x - u.x * angle.y, v.y * angle.z - u.y * angle.w);
            target[j * C] = turned.x;
            target[(j + 1) * C] = turned.y;
            target[(kHALF + j) * C] = turned.z;
            target[(kHALF + j + 1) * C] = turned.w;
            squares += turned.x * turned.x + turned.y * turned.y + turned.z * turned.z + turned.w * turned.w;
        };
        unrotate(ropePair(view, p + c, d), first.x, second.x, 0);
        unrotate(ropePair(view, p + c, d + 2), first.y, second.y, 2);
    }
    return squares;
}

// Sum over the block in a fixed order. `sums` is shared memory, one value a warp, used by nothing else.
__device__ __forceinline__ float blockSum(float value, float* sums)
{
    value = warpSum(value);
    if (threadIdx.x % 32 == 0)
    {
        sums[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float sum = 0.0F;
    for (int32_t w = 0; w < kWARPS; ++w)
    {
        sum += sums[w];
    }
    return sum;
}

// A = K B^T of the chunk in float32, by one block: a thread owns 4 columns of A and every strands-th row of the
// transposed B. The strands are added in order. One block, so that what the projection lost has one writer.
template <typename T, int32_t D, int32_t C>
__device__ __forceinline__ void projectKeys(View const& view, int32_t layer, StepRow const& step, float* tile)
{
    constexpr int32_t kHEADS = kTILE / (D * C);
    int32_t const rank = view.rank;
    int32_t const quads = rank / 4;
    int32_t const strands = kTHREADS / quads; // strands * rank <= 4 * kTHREADS
    int32_t const strand = static_cast<int32_t>(threadIdx.x) / quads;
    int32_t const column = static_cast<int32_t>(threadIdx.x) % quads * 4;
    float a[C][4] = {};
    float total = 0.0F;
    for (int32_t head = 0; head < view.kvHeads; head += kHEADS)
    {
        int32_t const heads = min(kHEADS, view.kvHeads - head);
        __syncthreads(); // all are done with the heads before
        total += unrotateKeys<T, D, C>(view, layer, step, head, heads, tile);
        __syncthreads();
        // Threads beyond the last strand have no rows.
        int32_t const end = strand < strands ? heads * D : 0;
        T const* const basis = static_cast<T const*>(view.factorB)
                               + sealedHead(view, layer, step.row.sealedRow, head) * D * rank + column;
        for (int32_t row = strand; row < end; row += strands * kROWS_AHEAD)
        {
            uint2 b[kROWS_AHEAD];
#pragma unroll
            for (int32_t k = 0; k < kROWS_AHEAD; ++k)
            {
                int32_t const at = row + k * strands;
                b[k] = make_uint2(0, 0);
                if (at < end)
                {
                    b[k] = *reinterpret_cast<uint2 const*>(basis + at * rank);
                }
            }
#pragma unroll
            for (int32_t k = 0; k < kROWS_AHEAD; ++k)
            {
                int32_t const at = row + k * strands;
                if (at >= end) // the tile there may hold anything
                {
                    break;
                }
                float2 const low = unpack<T>(b[k].x);
                float2 const high = unpack<T>(b[k].y);
#pragma unroll
                for (int32_t c = 0; c < C; c += 4)
                {
                    float4 const keys = *reinterpret_cast<float4 const*>(tile + at * C + c);
                    float const key[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
                    for (int32_t j = 0; j < 4; ++j)
                    {
                        a[c + j][0] += key[j] * low.x;
                        a[c + j][1] += key[j] * low.y;
                        a[c + j][2] += key[j] * high.x;
                        a[c + j][3] += key[j] * high.y;
                    }
                }
            }
        }
    }
    int32_t const p = step.row.sealing * C;
    int32_t const page = sealedPage(view, step.slot, step.row.sealing);
    T* const target = static_cast<T*>(view.factorA)
                      + ((size_t{static_cast<uint32_t>(layer)} * view.sealedPages + page) * kSEALED_PAGE_TOKENS
                            + p % kSEALED_PAGE_TOKENS)
                            * rank;
    float kept = 0.0F;
    // 4 tokens at a time: tile[strand][token][column].
#pragma unroll
    for (int32_t c = 0; c < C; c += 4)
    {
        __syncthreads();
        if (strand < strands)
        {
#pragma unroll
            for (int32_t j = 0; j < 4; ++j)
            {
                *reinterpret_cast<float4*>(tile + (strand * 4 + j) * rank + column)
                    = make_float4(a[c + j][0], a[c + j][1], a[c + j][2], a[c + j][3]);
            }
        }
        __syncthreads();
        for (int32_t item = static_cast<int32_t>(threadIdx.x) * 2; item < 4 * rank; item += kTHREADS * 2)
        {
            float2 sum = make_float2(0.0F, 0.0F);
            for (int32_t s = 0; s < strands; ++s)
            {
                float2 const part = *reinterpret_cast<float2 const*>(tile + s * 4 * rank + item);
                sum.x += part.x;
                sum.y += part.y;
            }
            kept += sum.x * sum.x + sum.y * sum.y;
            *reinterpret_cast<uint32_t*>(target + c * rank + item) = pack<T>(sum.x, sum.y); // rows follow each other
        }
    }
    __syncthreads();
    total = blockSum(total, tile);
    kept = blockSum(kept, tile + kWARPS);
    if (threadIdx.x == 0)
    {
        Residual& residual = view.residuals[size_t{static_cast<uint32_t>(step.slot)} * view.layers + layer];
        float const lost = total - kept;
        residual.total += total;
        residual.lost += lost < 0.0F ? 0.0F : lost; // NaN stays NaN
    }
}

// --- landmark and values of a head -----------------------------------------------------------------------------------

// Landmark `index` (pagedChunk()) from the chunk's keys [C, D], by a warp.
template <typename T, int32_t D>
__device__ __forceinline__ void sealLandmark(
    View const& view, T const* keys, size_t index, size_t centreIndex, int32_t lane)
{
    bool const active = lane < D / 4;
    int32_t const d = lane * 4;
    float4 mean = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (active)
    {
        for (int32_t c = 0; c < view.chunkSize; c += 8)
        {
            uint2 key[8];
#pragma unroll
            for (int32_t j = 0; j < 8; ++j)
            {
                key[j] = *reinterpret_cast<uint2 const*>(keys + (c + j) * D + d);
            }
#pragma unroll
            for (int32_t j = 0; j < 8; ++j)
            {
                float2 const low = unpack<T>(key[j].x);
                float2 const high = unpack<T>(key[j].y);
                mean.x += low.x;
                mean.y += low.y;
                mean.z += high.x;
                mean.w += high.y;
            }
        }
        float const share = 1.0F / static_cast<float>(view.chunkSize); // a power of two: exact
        mean = make_float4(mean.x * share, mean.y * share, mean.z * share, mean.w * share);
    }
    if (view.landmarkFormat == Format::kELEMENT)
    {
        if (active)
        {
            *reinterpret_cast<uint2*>(static_cast<T*>(view.landmarks) + index * D + d)
                = make_uint2(pack<T>(mean.x, mean.y), pack<T>(mean.z, mean.w));
        }
        return;
    }
    if (active)
    {
        float4 const centre = *reinterpret_cast<float4 const*>(view.centres + centreIndex * D + d);
        mean = make_float4(mean.x - centre.x, mean.y - centre.y, mean.z - centre.z, mean.w - centre.w);
    }
    // fmaxf passes over NaN, so that the other elements keep a usable scale.
    float const scale
        = e4m3Scale(warpMax(fmaxf(fmaxf(fabsf(mean.x), fabsf(mean.y)), fmaxf(fabsf(mean.z), fabsf(mean.w)))));
    if (active)
    {
        *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(view.landmarks) + index * D + d)
            = packE4m3(make_float2(mean.x, mean.y), scale) | packE4m3(make_float2(mean.z, mean.w), scale) << 16;
    }
    if (lane == 0)
    {
        view.landmarkScales[index] = scale;
    }
}

// One KV head by a warp.
template <typename T, int32_t D>
__device__ __forceinline__ void sealHead(
    View const& view, int32_t layer, StepRow const& step, int32_t head, int32_t lane)
{
    constexpr int32_t kLOADS = D / 32; // 16-byte loads a lane, of one unit
    int32_t const chunk = step.row.sealing;
    int32_t const p = chunk << view.chunkShift;
    int32_t const units = view.chunkSize / kUNIT; // 1 or 2
    int32_t const page = livePage(view, step.slot, step.row.ring, p);
    T const* const source = liveValueUnit<T>(view, layer, page, head, p); // units follow each other
    uint4 data[2 * kLOADS];
#pragma unroll
    for (int32_t i = 0; i < 2 * kLOADS; ++i)
    {
        data[i] = make_uint4(0, 0, 0, 0);
        if (i / kLOADS < units)
        {
            data[i] = load16(source + (i * 32 + lane) * 8);
        }
    }
    size_t const index = pagedChunk(view, layer, sealedPage(view, step.slot, chunk), head, chunk);
    sealLandmark<T, D>(
        view, liveKey<T>(view, layer, page, head, p), index, sealedHead(view, layer, step.row.sealedRow, head), lane);
    if (lane == 0)
    {
        view.excluded[index / 32] &= ~(1U << (index % 32)); // a page's words belong to one row and head
    }

    size_t const chunkBytes
        = size_t{static_cast<uint32_t>(view.chunkSize)} * D * (view.valueFormat == Format::kE4M3 ? 1 : 2);
    uint8_t* const target
        = reinterpret_cast<uint8_t*>(view.valueRegion[size_t{static_cast<uint32_t>(step.slot)} * view.layers + layer])
          + (size_t{static_cast<uint32_t>(head)} * step.row.valueStride + chunk) * chunkBytes;
    if (view.valueFormat == Format::kELEMENT)
    {
#pragma unroll
        for (int32_t i = 0; i < 2 * kLOADS; ++i)
        {
            if (i / kLOADS < units)
            {
                *reinterpret_cast<uint4*>(target + (i * 32 + lane) * 16) = data[i];
            }
        }
    }
    else
    {
        float amax = 0.0F;
#pragma unroll
        for (int32_t i = 0; i < 2 * kLOADS; ++i)
        {
            amax = largestOf<T>(data[i], amax);
        }
        float const scale = e4m3Scale(warpMax(amax));
#pragma unroll
        for (int32_t i = 0; i < 2 * kLOADS; ++i)
        {
            if (i / kLOADS < units)
            {
                *reinterpret_cast<uint2*>(target + (i * 32 + lane) * 8) = packE4m3<T>(data[i], scale);
            }
        }
        if (lane == 0)
        {
            view.valueScales[index] = scale;
        }
    }
    __threadfence_system(); // the region may be host memory
}

// The rows that seal a chunk are listed by every block; most of the time there are few or none. Work items are the A
// rows of each, then kWARPS heads of each. A grid of few blocks, because each takes a whole multiprocessor and most are
// busy with scoring.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS) sealKernel(View const view, int32_t layer, int32_t batch)
{
    __shared__ __align__(16) float tile[kTILE];
    __shared__ int32_t rows[kMAX_BATCH];
    __shared__ int32_t warpSums[kWARPS];
    int32_t count = 0;
    for (int32_t first = 0; first < batch; first += kTHREADS)
    {
        int32_t const b = first + static_cast<int32_t>(threadIdx.x);
        bool const seals = b < batch && view.steps[b].row.sealing >= 0;
        int32_t total;
        int32_t const before = blockExclusiveSum(seals ? 1 : 0, warpSums, total);
        if (seals)
        {
            rows[count + before] = b;
        }
        count += total;
        __syncthreads();
    }
    int32_t const headItems = (view.kvHeads + kWARPS - 1) / kWARPS;
    for (int32_t item = static_cast<int32_t>(blockIdx.x); item < count * (1 + headItems);
        item += static_cast<int32_t>(gridDim.x))
    {
        if (item >= count)
        {
            int32_t const heads = (item - count) / count;
            int32_t const head = heads * kWARPS + static_cast<int32_t>(threadIdx.x / 32);
            if (head < view.kvHeads)
            {
                sealHead<T, D>(view, layer, view.steps[rows[(item - count) % count]], head,
                    static_cast<int32_t>(threadIdx.x % 32));
            }
        }
        else if (view.chunkSize == 8)
        {
            projectKeys<T, D, 8>(view, layer, view.steps[rows[item]], tile);
        }
        else
        {
            projectKeys<T, D, 16>(view, layer, view.steps[rows[item]], tile);
        }
    }
}

} // namespace

cudaError_t sealChunks(View const& view, int32_t layer, int32_t batch, cudaStream_t stream)
{
    if (batch < 1 || batch > view.maxBatch || layer < 0 || layer >= view.layers)
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            int32_t const items = batch * (1 + (view.kvHeads + kWARPS - 1) / kWARPS);
            int32_t const blocks = items < kMAX_BLOCKS ? items : kMAX_BLOCKS;
            auto const kernel = sealKernel<decltype(tag), decltype(size)::value>;
            return launch(kernel, blocks, kTHREADS, 0, stream, view, layer, batch);
        });
}

} // namespace trtllm_shadowkv::kernels
