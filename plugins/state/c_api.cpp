#include "state/c_api.h"

#include "state/bindings.h"
#include "state/cuda_objects.h"
#include "state/device.h"
#include "state/failure.h"
#include "state/handle.h"
#include "state/link.h"
#include "state/pinned_memory.h"
#include "state/require.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct tsk_pinned
{
    int32_t device;
    trtllm_shadowkv::PinnedMemory memory;
};

namespace
{

using trtllm_shadowkv::CudaState;
using trtllm_shadowkv::DeviceGuard;
using trtllm_shadowkv::Failure;
using trtllm_shadowkv::RowRequest;
using trtllm_shadowkv::StepArguments;

constexpr int64_t kMAX_PINNED = int64_t{1} << 40;

// A fixed array: writing the message must not itself fail for want of memory.
thread_local char lastError[1024] = "";

tsk_status fail(tsk_status status, char const* message) noexcept
{
    std::snprintf(lastError, sizeof(lastError), "%s", message);
    return status;
}

// Runs `body` and turns what it throws into a status and a message.
template <typename Body>
tsk_status guarded(Body&& body) noexcept
{
    lastError[0] = '\0';
    try
    {
        body();
        return TSK_OK;
    }
    catch (Failure const& failure)
    {
        return fail(failure.status(), failure.what());
    }
    catch (std::exception const& exception)
    {
        return fail(TSK_SYSTEM_ERROR, exception.what());
    }
    catch (...)
    {
        return fail(TSK_SYSTEM_ERROR, "unknown exception");
    }
}

void requirePointer(void const* pointer, char const* name)
{
    if (pointer == nullptr)
    {
        throw Failure(TSK_INVALID_ARGUMENT, std::string(name) + " is null; expected the address of the result");
    }
}

void requireHandle(void const* handle, char const* name, char const* creator)
{
    trtllm_shadowkv::requireThat(
        handle != nullptr, std::string(name) + " is null", std::string("what ") + creator + " gave");
}

// Runs `body` on the state with its device current, one call at a time.
template <typename Body>
tsk_status withState(tsk_state* state, Body&& body) noexcept
{
    return guarded(
        [&]
        {
            requireHandle(state, "state", "tsk_state_create");
            std::lock_guard<std::mutex> const lock(state->mutex);
            DeviceGuard const guard(state->state->device());
            body(*state->state);
        });
}

cudaStream_t streamOf(void* stream)
{
    return static_cast<cudaStream_t>(stream);
}

} // namespace

char const* tsk_version(void)
{
    return TSK_VERSION;
}

char const* tsk_last_error(void)
{
    return lastError;
}

tsk_status tsk_device_count(int32_t* count)
{
    return guarded(
        [&]
        {
            requirePointer(count, "count");
            *count = trtllm_shadowkv::deviceCount();
        });
}

tsk_status tsk_device_info(int32_t device, tsk_device* info)
{
    return guarded(
        [&]
        {
            requirePointer(info, "info");
            *info = trtllm_shadowkv::deviceInfo(device);
        });
}

tsk_status tsk_measure_link(int32_t device, int64_t chunk_bytes, int64_t footprint_bytes, double* gigabytes_per_second)
{
    return guarded(
        [&]
        {
            requirePointer(gigabytes_per_second, "gigabytes_per_second");
            // In a thread of its own: the current device belongs to the thread, and putting the caller's back would
            // create a context on a device that it may never have used.
            *gigabytes_per_second
                = std::async(std::launch::async, trtllm_shadowkv::measureLink, device, chunk_bytes, footprint_bytes)
                      .get();
        });
}

tsk_status tsk_stream_create(int32_t device, void** stream)
{
    return guarded(
        [&]
        {
            requirePointer(stream, "stream");
            *stream = nullptr;
            trtllm_shadowkv::requireDevice(device);
            DeviceGuard const guard(device);
            cudaStream_t created = nullptr;
            TSK_CUDA(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
            *stream = created;
        });
}

tsk_status tsk_stream_destroy(void* stream)
{
    return guarded(
        [&]
        {
            requireHandle(stream, "stream", "tsk_stream_create");
            TSK_CUDA(cudaStreamSynchronize(streamOf(stream)));
            TSK_CUDA(cudaStreamDestroy(streamOf(stream)));
        });
}

tsk_status tsk_pinned_create(int32_t device, int64_t bytes, tsk_pinned** pinned)
{
    return guarded(
        [&]
        {
            requirePointer(pinned, "pinned");
            *pinned = nullptr;
            trtllm_shadowkv::requireRange("bytes", bytes, 1, kMAX_PINNED);
            trtllm_shadowkv::requireDevice(device);
            DeviceGuard const guard(device);
            auto const zero
                = [](std::byte* memory, size_t begin, size_t end) { std::memset(memory + begin, 0, end - begin); };
            *pinned = new tsk_pinned{device, {static_cast<size_t>(bytes), zero}};
        });
}

tsk_status tsk_pinned_address(tsk_pinned const* pinned, uint64_t* device_address, void** host_address)
{
    return guarded(
        [&]
        {
            requireHandle(pinned, "pinned", "tsk_pinned_create");
            requirePointer(device_address, "device_address");
            requirePointer(host_address, "host_address");
            *device_address = pinned->memory.deviceAddress();
            *host_address = pinned->memory.hostAddress();
        });
}

tsk_status tsk_pinned_destroy(tsk_pinned* pinned)
{
    return guarded(
        [&]
        {
            requireHandle(pinned, "pinned", "tsk_pinned_create");
            DeviceGuard const guard(pinned->device);
            delete pinned;
        });
}

tsk_status tsk_state_create(tsk_state_config const* config, tsk_state** state)
{
    return guarded(
        [&]
        {
            requirePointer(state, "state");
            *state = nullptr;
            trtllm_shadowkv::requireThat(config != nullptr, "config is null", "the address of a tsk_state_config");
            auto created = std::make_unique<tsk_state>();
            created->state = CudaState::create(*config);
            *state = created.release();
        });
}

tsk_status tsk_state_destroy(tsk_state* state)
{
    return guarded(
        [&]
        {
            requireHandle(state, "state", "tsk_state_create");
            trtllm_shadowkv::unbindState(state);
            DeviceGuard const guard(state->state->device());
            delete state;
        });
}

tsk_status tsk_state_bind(tsk_state* state, void* stream)
{
    return guarded(
        [&]
        {
            requireHandle(state, "state", "tsk_state_create");
            trtllm_shadowkv::bindState(state, streamOf(stream));
        });
}

tsk_status tsk_state_unbind(tsk_state* state)
{
    return guarded(
        [&]
        {
            requireHandle(state, "state", "tsk_state_create");
            trtllm_shadowkv::unbindState(state);
        });
}

tsk_status tsk_state_describe(tsk_state* state, tsk_buffers* buffers)
{
    return withState(state,
        [&](CudaState& s)
        {
            requirePointer(buffers, "buffers");
            *buffers = s.describe();
        });
}

tsk_status tsk_state_allocate(tsk_state* state, int32_t slot, int32_t prompt_tokens, int32_t total_tokens,
    int32_t top_k, int32_t dense, uint64_t const* value_addresses, int32_t value_stride, void* stream)
{
    return withState(state,
        [&](CudaState& s)
        {
            RowRequest const request{prompt_tokens, total_tokens, top_k, dense != 0, value_addresses, value_stride};
            s.allocate(slot, request, streamOf(stream));
        });
}

tsk_status tsk_state_load_row(tsk_state* state, int32_t slot, int32_t length, void* stream)
{
    return withState(state, [&](CudaState& s) { s.load(slot, length, streamOf(stream)); });
}

tsk_status tsk_state_release(tsk_state* state, int32_t slot)
{
    return withState(state, [&](CudaState& s) { s.release(slot); });
}

tsk_status tsk_state_row(tsk_state* state, int32_t slot, tsk_row* row)
{
    return withState(state,
        [&](CudaState& s)
        {
            requirePointer(row, "row");
            *row = s.row(slot);
        });
}

tsk_status tsk_state_pages(tsk_state* state, int32_t slot, int32_t kind, int32_t* ids, int32_t capacity, int32_t* count)
{
    return withState(state,
        [&](CudaState& s)
        {
            requirePointer(count, "count");
            trtllm_shadowkv::requireRange("capacity", capacity, 0, INT32_MAX);
            if (capacity > 0)
            {
                requirePointer(ids, "ids");
            }
            std::vector<int32_t> const& pages = s.pages(slot, kind);
            *count = static_cast<int32_t>(pages.size());
            std::copy_n(pages.begin(), std::min(*count, capacity), ids);
        });
}

tsk_status tsk_state_statistics(tsk_state* state, int32_t slot, tsk_statistics* statistics, void* stream)
{
    return withState(state,
        [&](CudaState& s)
        {
            requirePointer(statistics, "statistics");
            *statistics = s.statistics(slot, streamOf(stream));
        });
}

tsk_status tsk_state_fault(tsk_state* state, uint32_t* fault, void* stream)
{
    return withState(state,
        [&](CudaState& s)
        {
            requirePointer(fault, "fault");
            *fault = s.fault(streamOf(stream));
        });
}

tsk_status tsk_state_poison(tsk_state* state)
{
    return withState(state, [](CudaState& s) { s.poison(); });
}

tsk_status tsk_state_begin_context(tsk_state* state, int32_t slot, int32_t start, int32_t length, void* stream)
{
    return withState(state, [&](CudaState& s) { s.beginContext(slot, start, length, streamOf(stream)); });
}

tsk_status tsk_state_seal_prompt(tsk_state* state, int32_t slot, void* stream)
{
    return withState(state, [&](CudaState& s) { s.sealPrompt(slot, streamOf(stream)); });
}

tsk_status tsk_state_begin_generation(tsk_state* state, int32_t const* slots, int32_t batch, int32_t* positions)
{
    return withState(state,
        [&](CudaState& s)
        {
            trtllm_shadowkv::requireThat(slots != nullptr, "slots is null", "the host address of the batch's slots");
            s.beginGeneration(slots, batch, positions);
        });
}

tsk_status tsk_step_prologue(tsk_state* state, int32_t const* slots, int32_t batch, void* stream)
{
    return withState(state, [&](CudaState& s) { s.prologue(slots, batch, streamOf(stream)); });
}

tsk_status tsk_landmark_topk(tsk_state* state, int32_t layer, void const* qkv, int32_t const* positions, int32_t batch,
    void* q, int32_t* selection, void* stream)
{
    StepArguments const arguments{layer, batch, qkv, positions, q, selection, nullptr, streamOf(stream)};
    return withState(state, [&](CudaState& s) { s.landmarkTopK(arguments); });
}

tsk_status tsk_key_reconstruct(tsk_state* state, int32_t layer, int32_t batch, void* stream)
{
    StepArguments const arguments{layer, batch, nullptr, nullptr, nullptr, nullptr, nullptr, streamOf(stream)};
    return withState(state, [&](CudaState& s) { s.keyReconstruct(arguments); });
}

tsk_status tsk_sparse_attention(tsk_state* state, int32_t layer, void const* q, int32_t batch, void* out, void* stream)
{
    // Attention only reads q.
    StepArguments const arguments{layer, batch, nullptr, nullptr, const_cast<void*>(q), nullptr, out, streamOf(stream)};
    return withState(state, [&](CudaState& s) { s.sparseAttention(arguments); });
}

tsk_status tsk_state_stage(tsk_state* state, int32_t stage, int32_t layer, int32_t begin, int32_t end, int32_t batch,
    void const* qkv, int32_t const* positions, void* q, int32_t* selection, void* out, void* stream)
{
    StepArguments const arguments{layer, batch, qkv, positions, q, selection, out, streamOf(stream)};
    return withState(state, [&](CudaState& s) { s.stage(stage, {begin, end}, arguments); });
}
