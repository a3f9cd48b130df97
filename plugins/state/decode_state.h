// The owner of a state's device memory, streams and events, and of the order in which a step's kernels run.
//
// Kernels of a layer run on two streams: the caller's, and the state's own fetch stream, on which chunks are sealed and
// values fetched. sparseAttention joins them again, so a step's calls fork and join within the caller's stream and may
// be captured.
#pragma once

#include "kernels/decode/view.h"
#include "state/c_api.h"
#include "state/row_book.h"
#include "state/state_config.h"

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <vector>

namespace trtllm_shadowkv
{

// Arguments of one op or stage; what it has no use for is not looked at.
struct StepArguments
{
    int32_t layer{0};
    int32_t batch{0};
    void const* qkv{nullptr};
    int32_t const* positions{nullptr};
    void* q{nullptr};
    int32_t* selection{nullptr};
    void* out{nullptr};
    cudaStream_t stream{nullptr};
};

// Batch rows [begin, end).
struct RowGroup
{
    int32_t begin;
    int32_t end;
};

// See the functions of the same names in state/c_api.h. Each throws Failure; none is for several threads at once, and
// each needs the state's device to be current.
class DecodeState
{
public:
    // Makes the device current for its own time.
    static std::unique_ptr<DecodeState> create(tsk_state_config const& config);
    ~DecodeState();
    DecodeState(DecodeState const&) = delete;
    DecodeState& operator=(DecodeState const&) = delete;

    // -1: a dry state.
    int32_t device() const noexcept
    {
        return mDevice;
    }

    tsk_buffers describe() const;
    void allocate(int32_t slot, RowRequest const& request, cudaStream_t stream);
    void load(int32_t slot, int32_t length, cudaStream_t stream);
    void release(int32_t slot);
    tsk_row row(int32_t slot) const;
    std::vector<int32_t> const& pages(int32_t slot, int32_t kind) const;
    tsk_statistics statistics(int32_t slot, cudaStream_t stream) const;
    uint32_t fault(cudaStream_t stream);
    void poison();

    void beginGeneration(int32_t const* slots, int32_t batch);
    void prologue(int32_t const* slots, int32_t batch, cudaStream_t stream);
    void landmarkTopK(StepArguments const& a);
    void keyReconstruct(StepArguments const& a);
    void sparseAttention(StepArguments const& a);
    void stage(int32_t stage, RowGroup rows, StepArguments const& a);

private:
    struct Device;

    explicit DecodeState(tsk_state_config const& config);

    void requireStep(StepArguments const& a) const;
    void requireSelection(int32_t const* selection) const;
    void requireDevice() const;
    void requireIdle(cudaStream_t stream) const;
    int32_t groups(int32_t batch) const;
    RowGroup group(int32_t batch, int32_t index) const;
    int32_t tailBegin(int32_t batch) const;
    void upload(int32_t slot, BookRow const& row, cudaStream_t stream) const;

    int32_t mDevice;
    int32_t mRowGroups;
    bool mSeals; // some row could be sealed
    SealRule mRule;
    kernels::View mView;
    uint64_t mBytes;
    RowBook mBook;
    std::unique_ptr<Device> mOn; // null in a dry state
};

} // namespace trtllm_shadowkv
