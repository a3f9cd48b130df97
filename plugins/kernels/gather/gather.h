// Gather of chunks that lie anywhere in pinned host memory or device memory.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// Every chunk starts at a multiple of this and is a multiple of it long, at the source and at the destination [bytes].
inline constexpr int32_t kGATHER_ALIGNMENT = 16;
// Length of a chunk [bytes].
inline constexpr int32_t kGATHER_MIN_CHUNK = 128;
inline constexpr int32_t kGATHER_MAX_CHUNK = 8192;
// Bytes of one call: count * chunkBytes.
inline constexpr int64_t kGATHER_MAX_BYTES = int64_t{1} << 34;
// Blocks of one call; each has 512 threads of 64 registers: half of a multiprocessor.
inline constexpr int32_t kGATHER_MAX_BLOCKS = 4096;

// Copies chunk i from address sources[i] to address destinations[i], i < count, in the order of `stream`.
//
//   sources       device array [count]: addresses valid on the device, of pinned host memory (read in place) or of
//                 device memory, in any order and possibly repeated; ascending addresses are fastest
//   destinations  device array [count]: addresses of device memory; the chunks there must overlap neither each other
//                 nor a source
//   chunkBytes    bytes of a chunk, a multiple of kGATHER_ALIGNMENT from kGATHER_MIN_CHUNK to kGATHER_MAX_CHUNK
//   blocks        blocks to launch, 1 to kGATHER_MAX_BLOCKS: 4 fill a PCIe gen5 x16 link, more take multiprocessors
//                 away from what runs beside
//
// Launches one kernel and never synchronises, so that it may be captured into a graph; nothing is launched for a count
// of 0. Alignment of the addresses is the caller's duty: they are on the device. Returns cudaErrorInvalidValue for a
// size out of range, else what the launch returned.
cudaError_t gather(uint64_t const* sources, uint64_t const* destinations, int64_t count, int32_t chunkBytes,
    int32_t blocks, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
