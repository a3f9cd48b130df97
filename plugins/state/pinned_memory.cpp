#include "state/pinned_memory.h"

#include "state/failure.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

namespace trtllm_shadowkv
{
namespace
{

constexpr size_t kHUGE_PAGE = size_t{1} << 21;
constexpr size_t kMAX_THREADS = 16;

// Calls fill for parts of [0, bytes) from several threads, and from this one for what no thread could be had for.
void fillInParallel(std::byte* memory, size_t bytes, PinnedMemory::Fill const& fill)
{
    size_t const pages = (bytes + kHUGE_PAGE - 1) / kHUGE_PAGE;
    size_t const parts = std::min({pages, kMAX_THREADS, size_t{std::max(1U, std::thread::hardware_concurrency())}});
    auto const bound = [&](size_t part) { return std::min(bytes, pages * part / parts * kHUGE_PAGE); };
    std::vector<std::thread> threads;
    threads.reserve(parts);
    size_t part = 0;
    try
    {
        for (; part + 1 < parts; ++part)
        {
            threads.emplace_back(
                [&fill, memory, begin = bound(part), end = bound(part + 1)] { fill(memory, begin, end); });
        }
    }
    catch (std::exception const&)
    {
        // The system has no more threads: the rest is done here, which is slower and just as good.
    }
    fill(memory, bound(part), bytes);
    for (std::thread& thread : threads)
    {
        thread.join();
    }
}

} // namespace

PinnedMemory::PinnedMemory(size_t bytes, Fill const& fill) : mMappingBytes(bytes + kHUGE_PAGE)
{
    mMapping = mmap(nullptr, mMappingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mMapping == MAP_FAILED)
    {
        throw Failure(TSK_SYSTEM_ERROR, "mmap of " + std::to_string(mMappingBytes) + " bytes: " + std::strerror(errno));
    }
    try
    {
        uintptr_t const address = reinterpret_cast<uintptr_t>(mMapping);
        mMemory = reinterpret_cast<std::byte*>((address + kHUGE_PAGE - 1) / kHUGE_PAGE * kHUGE_PAGE);
        madvise(mMemory, bytes, MADV_HUGEPAGE); // refused where the system has none: then in small pages, only slower
        // A fork must not make this process's writes go to other pages than those that the GPU reads.
        madvise(mMemory, bytes, MADV_DONTFORK);
        fillInParallel(mMemory, bytes, fill);
        TSK_CUDA(cudaHostRegister(mMemory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    }
    catch (...)
    {
        munmap(mMapping, mMappingBytes);
        throw;
    }
    void* onDevice = nullptr;
    cudaError_t const error = cudaHostGetDevicePointer(&onDevice, mMemory, 0);
    if (error != cudaSuccess)
    {
        cudaHostUnregister(mMemory);
        munmap(mMapping, mMappingBytes);
        checkCuda(error, "cudaHostGetDevicePointer");
    }
    mDeviceAddress = reinterpret_cast<uint64_t>(onDevice);
}

PinnedMemory::~PinnedMemory()
{
    cudaHostUnregister(mMemory); // nobody is left to hear of an error
    munmap(mMapping, mMappingBytes);
}

} // namespace trtllm_shadowkv
