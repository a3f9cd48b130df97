// The one exception of this library; the C ABI turns it into a status and a message.
#pragma once

#include "state/c_api.h"

#include <cuda_runtime_api.h>
#include <stdexcept>
#include <string>

namespace trtllm_shadowkv
{

class Failure : public std::runtime_error
{
public:
    Failure(tsk_status status, std::string const& message) : std::runtime_error(message), mStatus(status)
    {
    }

    tsk_status status() const noexcept
    {
        return mStatus;
    }

private:
    tsk_status mStatus;
};

// Throws Failure for anything but cudaSuccess; `call` is the failed call's source text.
inline void checkCuda(cudaError_t error, char const* call)
{
    if (error == cudaSuccess)
    {
        return;
    }
    cudaGetLastError(); // or the next launch in this thread would report it again
    throw Failure(
        TSK_CUDA_ERROR, std::string(call) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

} // namespace trtllm_shadowkv

#define TSK_CUDA(call) ::trtllm_shadowkv::checkCuda((call), #call)
