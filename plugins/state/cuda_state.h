// The owner of a state's device memory, streams and events, and of the order in which a pass's kernels run.
//
// Kernels of a layer run on the caller's stream and on two of the state's own: one for the choice of chunks, and the fetch
// stream, on which values travel either way and generated chunks are sealed. sparseAttention joins them again, so a
// pass's calls fork and join within the caller's stream and may be captured.
#pragma once

#include "kernels/context/context.h"
#include "kernels/decode/view.h"
#include "state/c_api.h"
#include "state/row_book.h"
#include "state/state_config.h"

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <optional>
#include <vector>

namespace trtllm_shadowkv
{

// Arguments of one op or stage; what it has no use for is not looked at.
struct StepArguments
{
    int32_t layer{0};
    int32_t batch{0}; // in a context pass: tokens of the stretch
    void const* qkv{nullptr};
    int32_t const* positions{nullptr};
    void* q{nullptr};
    int32_t* selection{nullptr};
    void* out{nullptr};
    cudaStream_t stream{nullptr};
};

inline constexpr int32_t kANY_ELEMENT = -1;

// Batch rows [begin, end).
struct RowGroup
{
    int32_t begin;
    int32_t end;
};

// See the functions of the same names in state/c_api.h. Each throws Failure; none is for several threads at once, and
// each needs the state's device to be current.
class CudaState
{
public:
    // Makes the device current for its own time.
    static std::unique_ptr<CudaState> create(tsk_state_config const& config);
    ~CudaState();
    CudaState(CudaState const&) = delete;
    CudaState& operator=(CudaState const&) = delete;

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

    void beginContext(int32_t slot, int32_t start, int32_t length, cudaStream_t stream);
    void sealPrompt(int32_t slot, cudaStream_t stream);
    void beginGeneration(int32_t const* slots, int32_t batch, int32_t* positions);
    void prologue(int32_t const* slots, int32_t batch, cudaStream_t stream);
    // Of the pass that was begun, whose ops see `rows` rows.
    int32_t tokensOf(int32_t rows) const;
    // Throws unless the state is for ops of this shape (as requireOps() reads it; num_layers is at least theirs) and
    // element, which may be kANY_ELEMENT.
    void requireOpsOf(tsk_state_config const& ops) const;
    void landmarkTopK(StepArguments const& a);
    void keyReconstruct(StepArguments const& a);
    void sparseAttention(StepArguments const& a);
    void stage(int32_t stage, RowGroup rows, StepArguments const& a);

private:
    struct Device;

    // The stretch that is being read, and the chunks whose values go to the value region with it.
    struct Context
    {
        kernels::Stretch stretch;
        int32_t storeBegin;
        int32_t storeEnd;
        int32_t valueStride;
    };

    explicit CudaState(tsk_state_config const& config);

    void requireStep(StepArguments const& a) const;
    void requireContext(StepArguments const& a) const;
    void requireGeneration() const;
    void contextTopK(StepArguments const& a);
    void contextAttention(StepArguments const& a);
    void sealLayers(kernels::Seal const& seal, cudaStream_t stream);
    void requireSelection(int32_t const* selection) const;
    void requireDevice() const;
    void requireIdle(cudaStream_t stream) const;
    int32_t groups(int32_t batch) const;
    RowGroup group(int32_t batch, int32_t index) const;
    int32_t tailBegin(int32_t batch) const;
    void upload(int32_t slot, BookRow const& row, cudaStream_t stream) const;

    // Does `work` for a row of which the books are ahead of the device; where it fails the row is gone.
    template <typename Work>
    void orRelease(int32_t slot, Work&& work)
    {
        try
        {
            work();
        }
        catch (...)
        {
            mBook.release(slot);
            throw;
        }
    }

    int32_t mDevice;
    int32_t mRowGroups;
    tsk_state_config mConfig;
    bool mSeals; // some row could be sealed
    SealRule mRule;
    kernels::View mView;
    uint64_t mBytes;
    RowBook mBook;
    std::optional<Context> mContext; // none in a generation pass
    std::unique_ptr<Device> mOn;     // null in a dry state
};

} // namespace trtllm_shadowkv
