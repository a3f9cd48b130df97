// What a tsk_state is behind the C ABI.
#pragma once

#include "state/cuda_state.h"

#include <memory>
#include <mutex>

struct tsk_state
{
    std::mutex mutex; // of every call but the last
    std::unique_ptr<trtllm_shadowkv::CudaState> state;
};
