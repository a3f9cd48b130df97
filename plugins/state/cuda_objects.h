// CUDA objects that are given back at the end of their scope, also when an exception ends it.
#pragma once

#include "state/failure.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trtllm_shadowkv
{

// Makes `device` current in this thread for its scope; -1: leaves things as they are.
class DeviceGuard
{
public:
    explicit DeviceGuard(int32_t device)
    {
        if (device < 0)
        {
            return;
        }
        int before = 0;
        TSK_CUDA(cudaGetDevice(&before));
        if (before != device)
        {
            TSK_CUDA(cudaSetDevice(device));
            mBefore = before;
        }
    }

    ~DeviceGuard()
    {
        if (mBefore >= 0)
        {
            cudaSetDevice(mBefore);
        }
    }

    DeviceGuard(DeviceGuard const&) = delete;
    DeviceGuard& operator=(DeviceGuard const&) = delete;

private:
    int mBefore{-1};
};

// Device memory of `count` elements, aligned to 256 bytes.
template <typename T>
class DeviceArray
{
public:
    explicit DeviceArray(size_t count) : mBytes(count * sizeof(T))
    {
        TSK_CUDA(cudaMalloc(&mData, mBytes));
    }

    explicit DeviceArray(std::vector<T> const& values) : DeviceArray(values.size())
    {
        // The constructor above has finished, so the destructor runs even if this throws.
        TSK_CUDA(cudaMemcpy(mData, values.data(), mBytes, cudaMemcpyHostToDevice));
    }

    ~DeviceArray()
    {
        cudaFree(mData);
    }

    DeviceArray(DeviceArray const&) = delete;
    DeviceArray& operator=(DeviceArray const&) = delete;

    T* data() const noexcept
    {
        return static_cast<T*>(mData);
    }

    size_t bytes() const noexcept
    {
        return mBytes;
    }

private:
    void* mData{nullptr};
    size_t mBytes{0};
};

// A stream that does not wait for stream 0. What it still runs is waited for before it goes: memory named in its work
// may be freed after it.
class Stream
{
public:
    Stream()
    {
        TSK_CUDA(cudaStreamCreateWithFlags(&mStream, cudaStreamNonBlocking));
    }

    // Lower numbers go first; see cudaDeviceGetStreamPriorityRange.
    explicit Stream(int priority)
    {
        TSK_CUDA(cudaStreamCreateWithPriority(&mStream, cudaStreamNonBlocking, priority));
    }

    ~Stream()
    {
        cudaStreamSynchronize(mStream);
        cudaStreamDestroy(mStream);
    }

    Stream(Stream const&) = delete;
    Stream& operator=(Stream const&) = delete;

    cudaStream_t get() const noexcept
    {
        return mStream;
    }

private:
    cudaStream_t mStream{nullptr};
};

class Event
{
public:
    explicit Event(unsigned int flags = cudaEventDefault)
    {
        TSK_CUDA(cudaEventCreateWithFlags(&mEvent, flags));
    }

    ~Event()
    {
        cudaEventDestroy(mEvent);
    }

    Event(Event const&) = delete;
    Event& operator=(Event const&) = delete;

    cudaEvent_t get() const noexcept
    {
        return mEvent;
    }

private:
    cudaEvent_t mEvent{nullptr};
};

// An event that only orders streams.
class OrderEvent : public Event
{
public:
    OrderEvent() : Event(cudaEventDisableTiming)
    {
    }
};

} // namespace trtllm_shadowkv
