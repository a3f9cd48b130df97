// Host memory that the GPU reads in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace trtllm_shadowkv
{

// Pinned host memory, aligned to 2 MiB, in huge pages where the system gives them.
//
// Pages are touched by many threads before they are registered: ten times faster than cudaHostAlloc, which touches them
// in one thread. The memory is registered through the current device's context, for all of them.
class PinnedMemory
{
public:
    // Writes the bytes [begin, end) of the new memory; called from several threads at once for disjoint ranges, whose
    // bounds are multiples of 2 MiB (the last end is `bytes`). Must not throw.
    using Fill = std::function<void(std::byte* memory, size_t begin, size_t end)>;

    // bytes > 0. Throws Failure: TSK_SYSTEM_ERROR (no address space), TSK_CUDA_ERROR (not registered).
    PinnedMemory(size_t bytes, Fill const& fill);
    ~PinnedMemory();
    PinnedMemory(PinnedMemory const&) = delete;
    PinnedMemory& operator=(PinnedMemory const&) = delete;

    // The first byte, for the CPU.
    std::byte* hostAddress() const noexcept
    {
        return mMemory;
    }

    // The first byte's address on the device.
    uint64_t deviceAddress() const noexcept
    {
        return mDeviceAddress;
    }

private:
    void* mMapping{nullptr};
    size_t mMappingBytes{0};
    std::byte* mMemory{nullptr};
    uint64_t mDeviceAddress{0};
};

} // namespace trtllm_shadowkv
