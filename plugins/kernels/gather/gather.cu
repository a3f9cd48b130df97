#include "kernels/gather/gather.h"
#include "kernels/launch.cuh"

#include "kernels/ptx.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr uint32_t kTHREADS = 512;
constexpr uint32_t kWARP = 32;
// 16-byte loads a thread keeps in flight. A read of host memory takes microseconds: 4 blocks of 512 threads have 256 KiB
// under way, which is more than the link needs.
constexpr uint32_t kLOADS = 8;
constexpr uint32_t kTILE = kWARP * kLOADS;

// All chunks in a row are one sequence of `units` pieces of 16 bytes; a warp copies kTILE of them at a time, which is
// one long chunk, a part of one, or several short ones.
__global__ void __launch_bounds__(kTHREADS) gatherKernel(uint64_t const* __restrict__ sources,
    uint64_t const* __restrict__ destinations, uint32_t units, uint32_t unitsPerChunk)
{
    uint32_t const lane = threadIdx.x % kWARP;
    uint32_t const warps = gridDim.x * (kTHREADS / kWARP);
    uint32_t const tiles = (units + kTILE - 1) / kTILE;
    for (uint32_t tile = (blockIdx.x * kTHREADS + threadIdx.x) / kWARP; tile < tiles; tile += warps)
    {
        uint32_t const first = tile * kTILE + lane;
        uint64_t from[kLOADS];
        uint64_t to[kLOADS];
#pragma unroll
        for (uint32_t k = 0; k < kLOADS; ++k)
        {
            // Past the end: read the last unit again and store nothing, so that no load hangs on a branch.
            uint32_t const unit = min(first + k * kWARP, units - 1);
            uint32_t const chunk = unit / unitsPerChunk;
            uint64_t const offset = uint64_t{unit - chunk * unitsPerChunk} * kGATHER_ALIGNMENT;
            from[k] = sources[chunk] + offset;
            to[k] = destinations[chunk] + offset;
        }
        uint4 data[kLOADS];
#pragma unroll
        for (uint32_t k = 0; k < kLOADS; ++k)
        {
            data[k] = loadOnce(from[k]);
        }
#pragma unroll
        for (uint32_t k = 0; k < kLOADS; ++k)
        {
            if (first + k * kWARP < units)
            {
                store(to[k], data[k]);
            }
        }
    }
}

} // namespace

cudaError_t gather(uint64_t const* sources, uint64_t const* destinations, int64_t count, int32_t chunkBytes,
    int32_t blocks, cudaStream_t stream)
{
    if (chunkBytes < kGATHER_MIN_CHUNK || chunkBytes > kGATHER_MAX_CHUNK || chunkBytes % kGATHER_ALIGNMENT != 0
        || count < 0 || count > kGATHER_MAX_BYTES / chunkBytes || blocks < 1 || blocks > kGATHER_MAX_BLOCKS)
    {
        return cudaErrorInvalidValue;
    }
    if (count == 0)
    {
        return cudaSuccess;
    }
    uint32_t const unitsPerChunk = static_cast<uint32_t>(chunkBytes / kGATHER_ALIGNMENT);
    uint32_t const units = static_cast<uint32_t>(count) * unitsPerChunk; // at most 2^30
    return launch(gatherKernel, blocks, kTHREADS, 0, stream, sources, destinations, units, unitsPerChunk);
}

} // namespace trtllm_shadowkv::kernels
