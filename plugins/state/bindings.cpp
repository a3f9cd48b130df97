#include "state/bindings.h"

#include "state/failure.h"
#include "state/require.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>

namespace trtllm_shadowkv
{
namespace
{

struct Bindings
{
    std::shared_mutex mutex;
    std::map<cudaStream_t, tsk_state*> states;
};

Bindings& bindings()
{
    static Bindings* const all = new Bindings; // never destroyed: an engine may end after static objects
    return *all;
}

} // namespace

void bindState(tsk_state* state, cudaStream_t stream)
{
    requireThat(stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread,
        "stream is a default stream", "a stream of the caller's own, on which no other state's engine runs");
    Bindings& all = bindings();
    std::unique_lock<std::shared_mutex> const lock(all.mutex);
    auto const isThis = [&](auto const& entry) { return entry.second == state; };
    if (std::any_of(all.states.begin(), all.states.end(), isThis))
    {
        throw Failure(TSK_WRONG_STATE, "the state is bound to a stream; expected one that is not; unbind it first");
    }
    if (!all.states.emplace(stream, state).second)
    {
        throw Failure(TSK_WRONG_STATE, "another state is bound to this stream; expected a stream for each state");
    }
}

void unbindState(tsk_state* state)
{
    Bindings& all = bindings();
    std::unique_lock<std::shared_mutex> const lock(all.mutex);
    for (auto entry = all.states.begin(); entry != all.states.end();)
    {
        entry = entry->second == state ? all.states.erase(entry) : std::next(entry);
    }
}

BoundState::BoundState(cudaStream_t stream) : mBindings(bindings().mutex)
{
    auto const found = bindings().states.find(stream);
    if (found != bindings().states.end())
    {
        mCall = std::unique_lock<std::mutex>(found->second->mutex);
        mState = found->second->state.get();
    }
}

} // namespace trtllm_shadowkv
