// Kernels with one mistake each, for selftest.cu.
#include "kernels/hopper.cuh"
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

// --- of hopper.cuh ----------------------------------------------------------------------------------------------------------

enum class Part
{
    kWHOLE, // as it should be
    kNO_FENCE,
    kNO_BEGIN,
    kNO_WAIT,
    kREAD_BEFORE,
    kWRITE_BEFORE,
    kCOPY_BEFORE,
    kSTORE_BEFORE,
    kNO_COPIES,
    kSTRAIGHT
};

// A warpgroup's product, with a mistake.
template <Part kPART>
__global__ void productKernel(int32_t* out)
{
    char* const memory = dynamicShared<char>() + 1024 - 16;
    uint32_t const shared = sharedAddress(memory);
    for (uint32_t i = threadIdx.x; i < 128 * 8; i += blockDim.x)
    {
        copyAsyncPart(shared + i * 16, out, 0);
    }
    commitCopies();
    if (kPART != Part::kNO_COPIES)
    {
        waitForCopies<0>();
    }
    if (kPART != Part::kNO_FENCE)
    {
        fenceForProducts();
    }
    __syncthreads();
    uint64_t const matrix = turnedMatrix(shared + (kPART == Part::kSTRAIGHT ? 128 : 0));
    float d[64];
    if (kPART != Part::kNO_BEGIN)
    {
        beginProducts();
    }
    startProduct<__half, false>(d, matrix, matrix);
    commitProducts();
    float sum = 0.0F;
    if (kPART == Part::kREAD_BEFORE)
    {
        sum = d[threadIdx.x % 64];
    }
    if (kPART == Part::kWRITE_BEFORE)
    {
        d[63] += 1.0F;
    }
    if (kPART == Part::kCOPY_BEFORE && threadIdx.x == 70)
    {
        copyAsync<16>(shared + 128 * 127 + 16 * 7, out); // k from 0 on of row 127
    }
    if (kPART == Part::kSTORE_BEFORE && threadIdx.x == 70)
    {
        memory[0] = 1;
    }
    if (kPART != Part::kNO_WAIT)
    {
        waitForProducts<0>();
        settle(d);
    }
    sum += d[(threadIdx.x + 1) % 64];
    if (threadIdx.x < 64)
    {
        out[threadIdx.x] = isnan(sum) ? -1 : static_cast<int32_t>(sum);
    }
}

// The barrier in which all go on, but for a mistake.
__global__ void freshKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    out[0] = 0;
    await(sharedAddress(&barrier), 0);
}

__global__ void awaitKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    uint32_t const at = sharedAddress(&barrier);
    if (threadIdx.x == 0)
    {
        initBarrier(at, 64);
    }
    __syncthreads();
    await(at, 1); // counts as ended
    if (threadIdx.x != 9)
    {
        arrive(at);
    }
    if (threadIdx.x >= 32)
    {
        await(at, 0);
    }
    out[threadIdx.x] = 0;
}

__global__ void unsyncedKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0)
    {
        initBarrier(sharedAddress(&barrier), 64);
    }
    __syncwarp();
    arrive(sharedAddress(&barrier));
    out[threadIdx.x] = 0;
}

// Twice as many arrivals as expected: the second phase ends before the end of the first was seen.
__global__ void arrivalsKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    uint32_t const at = sharedAddress(&barrier);
    if (threadIdx.x == 0)
    {
        initBarrier(at, 15);
    }
    __syncthreads();
    if (threadIdx.x == 0)
    {
        await(at, 0);
    }
    else if (threadIdx.x < 31)
    {
        arrive(at);
    }
    out[threadIdx.x] = 0;
}

__global__ void twiceKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    uint32_t const at = sharedAddress(&barrier);
    if (threadIdx.x == 0)
    {
        initBarrier(at, 64);
    }
    __syncthreads();
    arriveWithCopies(at);
    arriveWithCopies(at);
    await(at, 0);
    out[threadIdx.x] = 0;
}

__global__ void overKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    uint32_t const at = sharedAddress(&barrier);
    if (threadIdx.x == 0)
    {
        initBarrier(at, 64);
        barrier = 0;
    }
    __syncthreads();
    arrive(at);
    out[threadIdx.x] = 0;
}

__global__ void countsKernel(int32_t* out)
{
    if (threadIdx.x < 32)
    {
        meetAt<64>(3);
    }
    else
    {
        arriveAt<32>(3);
    }
    out[threadIdx.x] = 0;
}

__global__ void aloneKernel(int32_t* out)
{
    if (threadIdx.x < 32)
    {
        meetAt<64>(3);
    }
    out[threadIdx.x] = 0;
}

// Copies that nobody waits for, of a ring's only tile.
__global__ void ringKernel(int32_t* out)
{
    __shared__ uint64_t barrier;
    __shared__ uint4 cells[32];
    uint32_t const at = sharedAddress(&barrier);
    if (threadIdx.x == 0)
    {
        initBarrier(at, 32);
    }
    __syncthreads();
    if (threadIdx.x < 32)
    {
        copyAsync<16>(sharedAddress(cells + threadIdx.x), out);
        arriveWithCopies(at);
    }
    meetAt<64>(5);
    out[threadIdx.x] = static_cast<int32_t>(cells[threadIdx.x % 32].x);
}

cudaError_t launchOn(void (*kernel)(int32_t*), int32_t sharedBytes, bool print = false, int32_t threads = 64)
{
    void* memory = nullptr;
    cudaMalloc(&memory, 64 * sizeof(int32_t));
    int32_t* const out = static_cast<int32_t*>(memory);
    if (print)
    {
        std::memset(out, 0, 64 * sizeof(int32_t));
    }
    cudaError_t const error = launch(kernel, 1, threads, sharedBytes, nullptr, out);
    for (int i = 0; print && i < 64; ++i)
    {
        std::printf("%d ", out[i]);
    }
    return error;
}

// launch() asks by itself.
cudaError_t launchUnasked()
{
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(64);
    config.dynamicSmemBytes = 64 << 10;
    return cudaLaunchKernelEx(&config, endKernel, static_cast<int32_t*>(nullptr));
}

template <Part kPART>
cudaError_t launchProduct()
{
    return launchOn(productKernel<kPART>, 1024 - 16 + 128 * 128, true, 128);
}

std::map<std::string, std::function<cudaError_t()>> const kCASES = {
    {"deadlock", [] { return launchOn(deadlockKernel, 0); }},
    {"part", [] { return launchOn(partKernel, 0); }},
    {"barrier", [] { return launchOn(barrierKernel, 0); }},
    {"end", [] { return launchOn(endKernel, 0); }},
    {"mask", [] { return launchOn(maskKernel, 0); }},
    {"unasked", launchUnasked},
    {"past", [] { return launchOn(pastKernel, 64 * 4); }},
    {"misaligned", [] { return launchOn(misalignedKernel, 1024); }},
    {"foreign", [] { return launchOn(foreignKernel, 0); }},
    {"guard", [] { return launchOn(guardKernel, 0); }},
    {"stack", [] { return launchOn(stackKernel, 0); }},
    {"divide", [] { return launchOn(divideKernel, 0); }},
    {"race", [] { return launchOn(raceKernel, 0, true); }},
    {"no wait", [] { return launchOn(noWaitKernel, 1024, true); }},
    {"product", launchProduct<Part::kWHOLE>},
    {"product without fence", launchProduct<Part::kNO_FENCE>},
    {"product without begin", launchProduct<Part::kNO_BEGIN>},
    {"product without wait", launchProduct<Part::kNO_WAIT>},
    {"product read before", launchProduct<Part::kREAD_BEFORE>},
    {"product written before", launchProduct<Part::kWRITE_BEFORE>},
    {"matrix copied over", launchProduct<Part::kCOPY_BEFORE>},
    {"matrix stored over", launchProduct<Part::kSTORE_BEFORE>},
    {"matrix not there", launchProduct<Part::kNO_COPIES>},
    {"matrix not at 1024", launchProduct<Part::kSTRAIGHT>},
    {"fresh", [] { return launchOn(freshKernel, 0); }},
    {"await", [] { return launchOn(awaitKernel, 0); }},
    {"unsynced", [] { return launchOn(unsyncedKernel, 0); }},
    {"arrivals", [] { return launchOn(arrivalsKernel, 0); }},
    {"twice", [] { return launchOn(twiceKernel, 0); }},
    {"written over", [] { return launchOn(overKernel, 0); }},
    {"counts", [] { return launchOn(countsKernel, 0); }},
    {"alone", [] { return launchOn(aloneKernel, 0); }},
    {"ring", [] { return launchOn(ringKernel, 0, true); }},
};

} // namespace

cudaError_t makeMistake(std::string const& name)
{
    return kCASES.at(name)();
}

} // namespace trtllm_shadowkv::kernels
