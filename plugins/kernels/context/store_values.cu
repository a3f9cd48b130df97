#include "kernels/context/context.h"
#include "kernels/decode/quantise.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

// As many warps as a PCIe gen5 link takes values from beside attention, and hardly more: stores that wait for the link hold
// up the loads of other kernels (16 blocks of 512 threads cost attention half of the time that they ran). Each block has a
// multiprocessor for itself, which alone brings 37 GB/s to the link.
constexpr int32_t kTHREADS = 384;
constexpr int32_t kBLOCKS = 2;
constexpr int32_t kE4M3_THREADS = 512; // whose warps wait longer for what they store
constexpr int32_t kE4M3_BLOCKS = 10;
constexpr int32_t kLOADS = 8; // 16-byte loads a lane keeps in flight
constexpr uint32_t kTILE = 32 * kLOADS;
constexpr uint32_t kPIECE = 16;    // bytes
constexpr int32_t kMAX_CHUNK = 16; // tokens

// Where the values of chunks go.
struct Target
{
    int32_t layer;
    int32_t slot;
    int32_t valueStride;
    int32_t begin; // chunks
    int32_t end;
};

__device__ __forceinline__ uint64_t regionOf(View const& view, Target const& target)
{
    return view.valueRegion[size_t{static_cast<uint32_t>(target.slot)} * view.layers + target.layer];
}

// The values of a head are one sequence of pieces on both sides, but for the pages. Neighbouring warps of the grid take
// neighbouring tiles.
template <int32_t D>
__global__ void __launch_bounds__(kTHREADS) storeKernel(__grid_constant__ View const view, Target const target)
{
    constexpr uint32_t kPAGE_PIECES = kLIVE_PAGE_TOKENS * D / 8;
    uint32_t const lane = threadIdx.x % 32;
    uint32_t const warps = gridDim.x * (blockDim.x / 32);
    int32_t const ring = view.rows[target.slot].ring;
    uint64_t const region = regionOf(view, target);
    uint32_t const chunkPieces = static_cast<uint32_t>(view.chunkSize * D / 8);
    uint32_t const begin = static_cast<uint32_t>(target.begin) * chunkPieces; // at most 2^18 chunks of 2^7 pieces
    uint32_t const end = static_cast<uint32_t>(target.end) * chunkPieces;
    uint32_t const headTiles = (end - begin + kTILE - 1) / kTILE;
    uint32_t const tiles = headTiles * static_cast<uint32_t>(view.kvHeads);
    for (uint32_t tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; tile < tiles; tile += warps)
    {
        uint32_t const head = tile / headTiles;
        uint32_t const first = begin + (tile - head * headTiles) * kTILE + lane;
        // Past the end: read the last piece again and store nothing, so that no load hangs on a branch.
        uint64_t from[kLOADS];
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            uint32_t const piece = min(first + k * 32, end - 1);
            int32_t const p = static_cast<int32_t>(piece / kPAGE_PIECES) * kLIVE_PAGE_TOKENS;
            int32_t const page = livePage(view, target.slot, ring, p);
            from[k] = reinterpret_cast<uint64_t>(
                          liveValueUnit<uint16_t>(view, target.layer, page, static_cast<int32_t>(head), 0))
                      + piece % kPAGE_PIECES * kPIECE;
        }
        uint4 data[kLOADS];
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            data[k] = loadOnce(from[k]);
        }
        uint64_t const to
            = region + (uint64_t{head} * static_cast<uint32_t>(target.valueStride) * chunkPieces + first) * kPIECE;
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            if (first + k * 32 < end)
            {
                store(to + static_cast<uint32_t>(k) * 32 * kPIECE, data[k]);
            }
        }
    }
}

// A warp takes a chunk of a head, and neighbouring warps of the grid neighbouring chunks. A lane takes pairs of pieces,
// which make one of e4m3.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kE4M3_THREADS) storeE4m3Kernel(__grid_constant__ View const view, Target const target)
{
    constexpr int32_t kPAIRS = (kMAX_CHUNK * D / 16 + 31) / 32; // of a lane
    int32_t const lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t const warps = static_cast<int32_t>(gridDim.x * (blockDim.x / 32));
    int32_t const ring = view.rows[target.slot].ring;
    int32_t const pairs = view.chunkSize * D / 16; // of the chunk
    uint64_t const region = regionOf(view, target);
    int32_t const headChunks = target.end - target.begin;
    int32_t const items = headChunks * view.kvHeads;
    for (int32_t item = static_cast<int32_t>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32); item < items;
        item += warps)
    {
        int32_t const head = item / headChunks;
        int32_t const chunk = target.begin + (item - head * headChunks);
        int32_t const p = chunk << view.chunkShift;
        T const* const from = liveValueUnit<T>(
            view, target.layer, livePage(view, target.slot, ring, p), head, p); // units follow each other
        uint4 data[kPAIRS][2];
#pragma unroll
        for (int32_t k = 0; k < kPAIRS; ++k)
        {
            data[k][0] = make_uint4(0, 0, 0, 0);
            data[k][1] = make_uint4(0, 0, 0, 0);
            if (k * 32 + lane < pairs)
            {
                data[k][0] = load16(from + (k * 32 + lane) * 16);
                data[k][1] = load16(from + (k * 32 + lane) * 16 + 8);
            }
        }
        float amax = 0.0F;
#pragma unroll
        for (int32_t k = 0; k < kPAIRS; ++k)
        {
            amax = largestOf<T>(data[k][1], largestOf<T>(data[k][0], amax));
        }
        float const scale = e4m3Scale(warpMax(amax));
        uint64_t const to = region
                            + (uint64_t{static_cast<uint32_t>(head)} * static_cast<uint32_t>(target.valueStride)
                                  + static_cast<uint32_t>(chunk))
                                  * static_cast<uint32_t>(pairs) * kPIECE;
        // Read again, from L1: kept, they would not fit into the registers.
#pragma unroll 1
        for (int32_t k = lane; k < pairs; k += 32)
        {
            uint2 const low = packE4m3<T>(load16(from + k * 16), scale);
            uint2 const high = packE4m3<T>(load16(from + k * 16 + 8), scale);
            store(to + static_cast<uint32_t>(k) * kPIECE, make_uint4(low.x, low.y, high.x, high.y));
        }
        if (lane == 0)
        {
            view.valueScales[pagedChunk(view, target.layer, sealedPage(view, target.slot, chunk), head, chunk)] = scale;
        }
    }
}

} // namespace

cudaError_t storeValues(
    View const& view, int32_t layer, int32_t slot, int32_t valueStride, int32_t begin, int32_t end, cudaStream_t stream)
{
    if (layer < 0 || layer >= view.layers || slot < 0 || slot >= view.slots || begin < 0 || end < begin
        || end > valueStride || end > kMAX_TOKENS >> view.chunkShift)
    {
        return cudaErrorInvalidValue;
    }
    if (begin == end)
    {
        return cudaSuccess;
    }
    bool const isE4m3 = view.valueFormat == Format::kE4M3;
    // Half of a multiprocessor's, of which every block takes a little more: no two blocks share one.
    int32_t sharedBytes = 0;
    cudaError_t const error = attributeOfDevice(cudaDevAttrMaxSharedMemoryPerMultiprocessor, sharedBytes);
    sharedBytes /= 2;
    if (error != cudaSuccess)
    {
        return error;
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            constexpr int32_t kSIZE = decltype(size)::value;
            auto const kernel = isE4m3 ? storeE4m3Kernel<decltype(tag), kSIZE> : storeKernel<kSIZE>;
            dim3 const grid(static_cast<uint32_t>(isE4m3 ? kE4M3_BLOCKS : kBLOCKS));
            return launch(kernel, grid, isE4m3 ? kE4M3_THREADS : kTHREADS, sharedBytes, stream, view,
                Target{layer, slot, valueStride, begin, end});
        });
}

} // namespace trtllm_shadowkv::kernels
