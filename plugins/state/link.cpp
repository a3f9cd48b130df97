#include "state/link.h"

#include "kernels/gather/gather.h"
#include "state/cuda_objects.h"
#include "state/device.h"
#include "state/failure.h"
#include "state/pinned_memory.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace trtllm_shadowkv
{
namespace
{

constexpr int64_t kMAX_GATHERED = int64_t{1} << 28; // bytes a run: 5 ms of a PCIe gen5 link
constexpr int32_t kBLOCKS = 8;                      // twice what fills a PCIe gen5 link (tried on an H200)
constexpr int kRUNS = 7;
constexpr int kPOISON = 0xA5;

// Word i of the host memory: the splitmix64 generator's output, so that a word of a wrong place is never the right one.
uint64_t patternWord(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

void fillPattern(std::byte* memory, size_t begin, size_t end)
{
    uint64_t* const words = reinterpret_cast<uint64_t*>(memory);
    for (size_t i = begin / sizeof(uint64_t); i < end / sizeof(uint64_t); ++i)
    {
        words[i] = patternWord(i);
    }
}

// `count` distinct chunk numbers below `chunks`, spread evenly and in random order: one from each of `count` equal
// stretches. Repeated chunks would be found in the GPU's L2 cache.
std::vector<int64_t> randomChunks(int64_t count, int64_t chunks)
{
    std::mt19937_64 random(0); // a fixed seed: every call gathers the same chunks
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::shuffle(order.begin(), order.end(), random);
    int64_t const stretch = chunks / count;
    for (int64_t& chunk : order)
    {
        chunk = chunk * stretch + static_cast<int64_t>(random() % static_cast<uint64_t>(stretch));
    }
    return order;
}

void requireArguments(int64_t chunkBytes, int64_t footprintBytes)
{
    using namespace kernels;
    if (chunkBytes < kGATHER_MIN_CHUNK || chunkBytes > kGATHER_MAX_CHUNK || chunkBytes % kGATHER_ALIGNMENT != 0)
    {
        throw Failure(TSK_INVALID_ARGUMENT, "chunk_bytes is " + std::to_string(chunkBytes) + "; expected a multiple of "
                                                + std::to_string(kGATHER_ALIGNMENT) + " from "
                                                + std::to_string(kGATHER_MIN_CHUNK) + " to "
                                                + std::to_string(kGATHER_MAX_CHUNK));
    }
    if (footprintBytes < kLINK_MIN_FOOTPRINT || footprintBytes > kLINK_MAX_FOOTPRINT)
    {
        throw Failure(TSK_INVALID_ARGUMENT, "footprint_bytes is " + std::to_string(footprintBytes) + "; expected "
                                                + std::to_string(kLINK_MIN_FOOTPRINT) + " to "
                                                + std::to_string(kLINK_MAX_FOOTPRINT));
    }
}

// Throws Failure unless chunk i of `arrived` is chunk chunks[i] of the host memory, byte for byte.
void requireBytes(std::vector<uint64_t> const& arrived, std::vector<int64_t> const& chunks, int64_t chunkBytes)
{
    int64_t const words = chunkBytes / static_cast<int64_t>(sizeof(uint64_t));
    for (size_t i = 0; i < chunks.size(); ++i)
    {
        for (int64_t w = 0; w < words; ++w)
        {
            if (arrived[i * words + w] != patternWord(chunks[i] * words + w))
            {
                throw Failure(TSK_WRONG_BYTES,
                    "chunk " + std::to_string(i) + " of " + std::to_string(chunks.size()) + " (number "
                        + std::to_string(chunks[i]) + " in host memory) arrived with wrong bytes at offset "
                        + std::to_string(w * sizeof(uint64_t)) + ": a fault of the link or of the gather kernel");
            }
        }
    }
}

// Seconds of one gather of all chunks: the median of kRUNS, after one that is not counted.
double medianSeconds(DeviceArray<uint64_t> const& sources, DeviceArray<uint64_t> const& destinations, int64_t count,
    int32_t chunkBytes, cudaStream_t stream)
{
    Event begin;
    Event end;
    std::vector<float> milliseconds(kRUNS);
    for (int run = -1; run < kRUNS; ++run)
    {
        TSK_CUDA(cudaEventRecord(begin.get(), stream));
        TSK_CUDA(kernels::gather(sources.data(), destinations.data(), count, chunkBytes, kBLOCKS, stream));
        TSK_CUDA(cudaEventRecord(end.get(), stream));
        TSK_CUDA(cudaEventSynchronize(end.get()));
        TSK_CUDA(cudaEventElapsedTime(&milliseconds[std::max(run, 0)], begin.get(), end.get()));
    }
    std::nth_element(milliseconds.begin(), milliseconds.begin() + kRUNS / 2, milliseconds.end());
    return milliseconds[kRUNS / 2] * 1e-3;
}

} // namespace

double measureLink(int32_t device, int64_t chunkBytes, int64_t footprintBytes)
{
    requireArguments(chunkBytes, footprintBytes);
    requireDevice(device);
    TSK_CUDA(cudaSetDevice(device));

    int64_t const total = footprintBytes / chunkBytes;
    int64_t const count = std::min(total, kMAX_GATHERED / chunkBytes);
    std::vector<int64_t> const chunks = randomChunks(count, total);
    std::vector<uint64_t> arrived(count * chunkBytes / sizeof(uint64_t));

    PinnedMemory const host(footprintBytes, fillPattern);
    DeviceArray<std::byte> const destination(count * chunkBytes);
    std::vector<uint64_t> addresses(count);
    for (int64_t i = 0; i < count; ++i)
    {
        addresses[i] = host.deviceAddress() + chunks[i] * chunkBytes;
    }
    DeviceArray<uint64_t> const sources(addresses);
    for (int64_t i = 0; i < count; ++i)
    {
        addresses[i] = reinterpret_cast<uint64_t>(destination.data()) + i * chunkBytes;
    }
    DeviceArray<uint64_t> const destinations(addresses);

    Stream const stream; // last, so that it has ended before any memory goes
    TSK_CUDA(cudaMemsetAsync(destination.data(), kPOISON, destination.bytes(), stream.get()));
    double const seconds = medianSeconds(sources, destinations, count, static_cast<int32_t>(chunkBytes), stream.get());
    TSK_CUDA(
        cudaMemcpyAsync(arrived.data(), destination.data(), destination.bytes(), cudaMemcpyDeviceToHost, stream.get()));
    TSK_CUDA(cudaStreamSynchronize(stream.get()));
    requireBytes(arrived, chunks, chunkBytes);
    return static_cast<double>(count * chunkBytes) * 1e-9 / seconds;
}

} // namespace trtllm_shadowkv
