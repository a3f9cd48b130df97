// CUDA C++ for g++: what nvcc gives a .cu file by itself. Put in front of every .cu by -include.
//
// A launch runs at once. Its blocks run one after the other; a block's threads are fibers of the calling thread, which
// give way only at barriers and warp collectives (fibers.cpp).
#pragma once

#include "emulator/core.h"
#include "emulator/intrinsics.h"

#include <cuda_runtime_api.h>
#include <tuple>
#include <type_traits>
#include <utility>

// --- runtime --------------------------------------------------------------------------------------------------------------

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(P...), A&&... arguments)
{
    using Call = std::pair<void (*)(P...), std::tuple<std::decay_t<P>...>>;
    Call const call{kernel, std::tuple<std::decay_t<P>...>(static_cast<P>(arguments)...)};
    ::emulator::Launch launch{};
    launch.kernel = reinterpret_cast<void const*>(kernel);
    launch.grid = config->gridDim;
    launch.block = config->blockDim;
    launch.sharedBytes = config->dynamicSmemBytes;
    launch.invoke
        = [](void const* p) { std::apply(static_cast<Call const*>(p)->first, static_cast<Call const*>(p)->second); };
    launch.arguments = &call;
    return ::emulator::run(launch);
}

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), attribute, value);
}

template <typename... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(attributes, reinterpret_cast<void const*>(kernel));
}

template <typename... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, void (*kernel)(P...), int threads, size_t sharedBytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks, reinterpret_cast<void const*>(kernel), threads, sharedBytes);
}
