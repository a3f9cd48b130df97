// Prefix sums over a block.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{

// Sum of the values of the threads before this one; `total`: of all. blockDim.x is a multiple of 32. `warpSums` is
// shared memory, one value a warp, that the caller leaves alone until the next barrier.
template <typename T>
__device__ __forceinline__ T blockExclusiveSum(T value, T* warpSums, T& total)
{
    uint32_t const lane = threadIdx.x % 32;
    uint32_t const warp = threadIdx.x / 32;
    T sum = value;
#pragma unroll
    for (uint32_t offset = 1; offset < 32; offset *= 2)
    {
        T const before = __shfl_up_sync(kFULL_WARP, sum, offset);
        sum += lane >= offset ? before : T{0};
    }
    if (lane == 31)
    {
        warpSums[warp] = sum;
    }
    __syncthreads();
    T before = 0;
    total = 0;
    for (uint32_t w = 0; w < blockDim.x / 32; ++w)
    {
        before = w == warp ? total : before;
        total += warpSums[w];
    }
    return before + sum - value;
}

} // namespace trtllm_shadowkv::kernels
