// Kernels with one mistake each, for selftest.cu.
#include "kernels/launch.cuh"

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>

namespace trtllm_shadowkv::kernels
{
namespace
{

__global__ void deadlockKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    if (i == 7 || i >= 32)
    {
        __syncthreads();
    }
    else
    {
        out[i] = __shfl_sync(kFULL_WARP, i, 0);
    }
}

__global__ void partKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    out[i] = i < 16 ? __shfl_sync(kFULL_WARP, i, 0) : __any_sync(kFULL_WARP, i);
}

__global__ void barrierKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    if (i < 32)
    {
        __syncthreads();
        out[i] = i;
    }
    else
    {
        __syncthreads();
        out[i] = -i;
    }
}

__global__ void endKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    if (i == 40)
    {
        return;
    }
    __syncthreads();
    out[i] = i;
}

__global__ void maskKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    out[i] = __shfl_sync(0xffffU, i, 0);
}

__global__ void pastKernel(int32_t* out)
{
    dynamicShared<int32_t>()[threadIdx.x + 1] = out[0];
}

__global__ void misalignedKernel(int32_t* out)
{
    copyAsync<16>(sharedAddress(dynamicShared<uint4>()), reinterpret_cast<char*>(out) + 4 * (threadIdx.x % 4));
}

__global__ void foreignKernel(int32_t* out)
{
    uint32_t r[4];
    loadMatrices(r, sharedAddress(out + threadIdx.x * 4)); // of global memory
    out[threadIdx.x] = static_cast<int32_t>(r[0]);
}

__global__ void guardKernel(int32_t* out)
{
    out[threadIdx.x + 64] = 1;
}

__attribute__((noinline)) int32_t sink(int32_t volatile* p, int32_t depth)
{
    int32_t volatile frame[256];
    frame[depth % 256] = p[0];
    return depth == 0 ? 0 : sink(frame, depth - 1) + frame[depth % 256];
}

__global__ void stackKernel(int32_t* out)
{
    out[threadIdx.x] = sink(out, 100000);
}

__global__ void divideKernel(int32_t* out)
{
    out[threadIdx.x] = out[0] / (out[1] + 1); // 0xffffffff + 1
}

// What is printed depends on the order of threads.
__global__ void raceKernel(int32_t* out)
{
    __shared__ int32_t cells[64];
    cells[threadIdx.x] = static_cast<int32_t>(threadIdx.x);
    out[threadIdx.x] = cells[(threadIdx.x + 1) % 64];
}

// And on when copies happen.
__global__ void noWaitKernel(int32_t* out)
{
    uint4* const cells = dynamicShared<uint4>();
    copyAsync<16>(sharedAddress(cells + threadIdx.x), out);
    commitCopies();
    __syncthreads();
    out[threadIdx.x] = static_cast<int32_t>(cells[threadIdx.x].x);
}

cudaError_t launchOn(void (*kernel)(int32_t*), int32_t sharedBytes, bool print = false)
{
    void* memory = nullptr;
    cudaMalloc(&memory, 64 * sizeof(int32_t));
    int32_t* const out = static_cast<int32_t*>(memory);
    if (print)
    {
        std::memset(out, 0, 64 * sizeof(int32_t));
    }
    cudaError_t const error = launch(kernel, 1, 64, sharedBytes, nullptr, out);
    for (int i = 0; print && i < 64; ++i)
    {
        std::printf("%d ", out[i]);
    }
    return error;
}

std::map<std::string, std::function<cudaError_t()>> const kCASES = {
    {"deadlock", [] { return launchOn(deadlockKernel, 0); }},
    {"part", [] { return launchOn(partKernel, 0); }},
    {"barrier", [] { return launchOn(barrierKernel, 0); }},
    {"end", [] { return launchOn(endKernel, 0); }},
    {"mask", [] { return launchOn(maskKernel, 0); }},
    {"unasked", [] { return launchOn(endKernel, 64 << 10); }},
    {"past", [] { return launchOn(pastKernel, 64 * 4); }},
    {"misaligned", [] { return launchOn(misalignedKernel, 1024); }},
    {"foreign", [] { return launchOn(foreignKernel, 0); }},
    {"guard", [] { return launchOn(guardKernel, 0); }},
    {"stack", [] { return launchOn(stackKernel, 0); }},
    {"divide", [] { return launchOn(divideKernel, 0); }},
    {"race", [] { return launchOn(raceKernel, 0, true); }},
    {"no wait", [] { return launchOn(noWaitKernel, 1024, true); }},
};

} // namespace

cudaError_t makeMistake(std::string const& name)
{
    return kCASES.at(name)();
}

} // namespace trtllm_shadowkv::kernels
