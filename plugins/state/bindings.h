// Which state the plugins of an engine work on: that which is bound to the stream they are enqueued on.
#pragma once

#include "state/handle.h"

#include <cuda_runtime_api.h>
#include <mutex>
#include <shared_mutex>

namespace trtllm_shadowkv
{

// Throws Failure: the null stream or one of CUDA's two default streams, a state that is bound, a stream that has a state.
void bindState(tsk_state* state, cudaStream_t stream);

// Nothing to do where the state is not bound. Waits for every BoundState.
void unbindState(tsk_state* state);

// The state of a stream, for one call: others wait, also those that would unbind it.
class BoundState
{
public:
    explicit BoundState(cudaStream_t stream);

    // Null: there is none.
    CudaState* get() const noexcept
    {
        return mState;
    }

private:
    std::shared_lock<std::shared_mutex> mBindings;
    std::unique_lock<std::mutex> mCall;
    CudaState* mState{nullptr};
};

} // namespace trtllm_shadowkv
