// The CUDA runtime of the emulated GPU: device memory is host memory, everything happens at once.
#include "emulator.h"
#include "symbols.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <time.h>

namespace
{

constexpr size_t kALIGNMENT = 256;
constexpr size_t kPAGE = 4096;
constexpr int kSHARED = 227 << 10;

std::mutex gMutex;
std::map<void*, std::pair<void*, size_t>>& allocations() // what was mapped for them
{
    static auto& m = *new std::map<void*, std::pair<void*, size_t>>;
    return m;
}

thread_local cudaError_t lastError = cudaSuccess;

cudaError_t result(cudaError_t error)
{
    lastError = error == cudaSuccess ? lastError : error;
    return error;
}

// Ends at a page that nobody may touch (as near as the alignment allows), begins with bytes 0xff.
cudaError_t allocate(void** p, size_t bytes)
{
    *p = nullptr;
    if (bytes == 0)
    {
        return cudaSuccess;
    }
    size_t const room = (bytes + kALIGNMENT - 1) / kALIGNMENT * kALIGNMENT;
    size_t const inside = (room + kPAGE - 1) / kPAGE * kPAGE;
    void* const mapped
        = mmap(nullptr, inside + 2 * kPAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
    {
        return result(cudaErrorMemoryAllocation);
    }
    auto* const first = static_cast<unsigned char*>(mapped) + kPAGE;
    if (mprotect(first, inside, PROT_READ | PROT_WRITE) != 0)
    {
        munmap(mapped, inside + 2 * kPAGE);
        return result(cudaErrorMemoryAllocation);
    }
    *p = first + (inside - room);
    if (bytes <= size_t{256} << 20) // not what is only reserved
    {
        std::memset(*p, 0xff, bytes);
    }
    std::lock_guard<std::mutex> const lock(gMutex);
    allocations()[*p] = {mapped, inside + 2 * kPAGE};
    return cudaSuccess;
}

cudaError_t release(void* p)
{
    if (p == nullptr)
    {
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> const lock(gMutex);
    auto const at = allocations().find(p);
    if (at == allocations().end())
    {
        return result(cudaErrorInvalidValue);
    }
    munmap(at->second.first, at->second.second);
    allocations().erase(at);
    return cudaSuccess;
}

struct EventTime
{
    double seconds{0};
};

double now()
{
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Ten times the number.
int computeCapability()
{
    char const* const named = std::getenv("TSK_EMULATED_CAPABILITY");
    return named == nullptr ? 90 : std::atoi(named);
}

} // namespace

extern "C"
{

// --- memory ---------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes)
{
    return allocate(p, bytes);
}

cudaError_t cudaFree(void* p)
{
    return release(p);
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned int)
{
    return allocate(p, bytes);
}

cudaError_t cudaMallocHost(void** p, size_t bytes)
{
    return allocate(p, bytes);
}

cudaError_t cudaFreeHost(void* p)
{
    return release(p);
}

cudaError_t cudaHostRegister(void*, size_t, unsigned int)
{
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*)
{
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int)
{
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t)
{
    if (bytes != 0)
    {
        std::memmove(to, from, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t toPitch, void const* from, size_t fromPitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t)
{
    for (size_t i = 0; i < height; ++i)
    {
        std::memmove(static_cast<char*>(to) + i * toPitch, static_cast<char const*>(from) + i * fromPitch, width);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t)
{
    if (bytes != 0)
    {
        std::memset(p, value, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void* p, int value, size_t bytes)
{
    return cudaMemsetAsync(p, value, bytes, nullptr);
}

cudaError_t cudaMemset2DAsync(void* p, size_t pitch, int value, size_t width, size_t height, cudaStream_t)
{
    for (size_t i = 0; i < height; ++i)
    {
        std::memset(static_cast<char*>(p) + i * pitch, value, width);
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total)
{
    *free = *total = size_t{4} << 30;
    return cudaSuccess;
}

// --- devices --------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceSynchronize()
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device)
{
    if (device != 0)
    {
        return result(cudaErrorInvalidDevice);
    }
    std::memset(properties, 0, sizeof(*properties));
    std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
    properties->totalGlobalMem = size_t{4} << 30;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = kSHARED;
    properties->sharedMemPerMultiprocessor = (kSHARED + 1024);
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->major = computeCapability() / 10;
    properties->minor = computeCapability() % 10;
    properties->multiProcessorCount = 4;
    properties->l2CacheSize = 4 << 20;
    properties->canMapHostMemory = 1;
    properties->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device)
{
    if (device != 0)
    {
        return result(cudaErrorInvalidDevice);
    }
    switch (attribute)
    {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = kSHARED;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = kSHARED + 1024;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = 4;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = computeCapability() / 10;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = computeCapability() % 10;
        return cudaSuccess;
    case cudaDevAttrL2CacheSize:
        *value = 4 << 20;
        return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
    case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
    default:
        std::fprintf(stderr, "emulator: cudaDeviceGetAttribute(%d) is not emulated\n", static_cast<int>(attribute));
        return result(cudaErrorNotSupported);
    }
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int)
{
    std::snprintf(id, static_cast<size_t>(length), "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

// --- errors ---------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError()
{
    cudaError_t const error = lastError;
    lastError = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError()
{
    return lastError;
}

char const* cudaGetErrorName(cudaError_t error)
{
    switch (error)
    {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorIllegalAddress:
        return "cudaErrorIllegalAddress";
    case cudaErrorMisalignedAddress:
        return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    default:
        return "a CUDA error";
    }
}

char const* cudaGetErrorString(cudaError_t error)
{
    static thread_local char text[2400];
    std::snprintf(text, sizeof(text), "error %d of the emulated GPU; its last failure: %s", static_cast<int>(error),
        emulator::lastMessage());
    return text;
}

// --- streams and events -----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int)
{
    *stream = reinterpret_cast<cudaStream_t>(new char);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int)
{
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream)
{
    return cudaStreamCreateWithFlags(stream, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete reinterpret_cast<char*>(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int)
{
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int)
{
    *event = reinterpret_cast<cudaEvent_t>(new EventTime);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event)
{
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete reinterpret_cast<EventTime*>(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    reinterpret_cast<EventTime*>(event)->seconds = now();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t)
{
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    // At least a nanosecond: nothing takes no time.
    double const seconds = reinterpret_cast<EventTime*>(end)->seconds - reinterpret_cast<EventTime*>(begin)->seconds;
    *milliseconds = static_cast<float>(1e3 * std::max(seconds, 1e-9));
    return cudaSuccess;
}

// --- kernels --------------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(void const* kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
    {
        if (value < 0 || value > kSHARED)
        {
            return result(cudaErrorInvalidValue);
        }
        emulator::askForShared(kernel, static_cast<size_t>(value));
    }
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const*)
{
    std::memset(attributes, 0, sizeof(*attributes));
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = computeCapability();
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void const*, int, size_t)
{
    *blocks = 1;
    return cudaSuccess;
}

} // extern "C"
