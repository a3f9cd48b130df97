// Kernels that start before the one that they follow in their stream has ended (programmatic dependent launch, compute
// capability 9.0 and up; elsewhere they start after it).
//
// Before afterPrevious() such a kernel reads only what no kernel of this layer and step writes: View, StepRow, the tables
// of pages, what was sealed in steps before. Every block calls it, so that who waits for a kernel waits for those before
// it too.
#pragma once

#include "kernels/ptx.cuh"

#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// kernel<<<grid, threads, sharedBytes, stream>>>(arguments...), and what became of it.
//   isEarly  it may start before the kernel before has ended: it calls afterPrevious(), and the device can (View::startsEarly)
template <typename... P, typename... A>
cudaError_t launchEarly(bool isEarly, void (*kernel)(P...), dim3 grid, int32_t threads, int32_t sharedBytes,
    cudaStream_t stream, A const&... arguments)
{
    if (sharedBytes > 0) // with what is static in the kernel it may be more than a launch gets unasked
    {
        cudaError_t const error
            = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes);
        if (error != cudaSuccess)
        {
            return error;
        }
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<uint32_t>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(sharedBytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = isEarly ? 1U : 0U;
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

template <typename... P, typename... A>
cudaError_t launch(
    void (*kernel)(P...), dim3 grid, int32_t threads, int32_t sharedBytes, cudaStream_t stream, A const&... arguments)
{
    return launchEarly(false, kernel, grid, threads, sharedBytes, stream, arguments...);
}

} // namespace trtllm_shadowkv::kernels
