// The kernels of a generation step in their order, on the caller's stream, the select stream and the fetch stream.
#include "state/require.h"
#include "state/state_device.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

// Row groups: while one is fetched the next is scored. Where they end, in shares of the batch: the first is small, so that
// the link is soon at work, and while one is fetched there is time to score a larger one. Every launch of a fetch costs
// the link some 5 us.
constexpr int32_t kGROUP_BOUNDS[] = {0, 1, 3, 7, 12};
constexpr int32_t kDEFAULT_GROUPS = 4;

constexpr int32_t kMANY_MULTIPROCESSORS = 32;

// Multiprocessors for everything else.
int32_t besideFetch(View const& view)
{
    int32_t const left = view.multiprocessors >= kMANY_MULTIPROCESSORS ? kFETCH_BLOCKS : 1;
    return std::max(1, view.multiprocessors - left);
}

} // namespace

int32_t CudaState::groups(int32_t batch) const
{
    return std::min(batch, mRowGroups > 0 ? mRowGroups : kDEFAULT_GROUPS);
}

RowGroup CudaState::group(int32_t batch, int32_t index) const
{
    int32_t const count = groups(batch);
    bool const grow = mRowGroups == 0 && count == kDEFAULT_GROUPS;
    auto const bound = [&](int32_t i)
    {
        constexpr int32_t kWHOLE = kGROUP_BOUNDS[kDEFAULT_GROUPS];
        return grow ? std::max(i, (batch * kGROUP_BOUNDS[i] + kWHOLE - 1) / kWHOLE) : batch * i / count;
    };
    return {bound(index), bound(index + 1)};
}

// The last rows of the batch, whose values are fetched apart: those before them are attended in the meantime.
int32_t CudaState::tailBegin(int32_t batch) const
{
    int32_t const last = groups(batch) - 1;
    RowGroup const rows = group(batch, last);
    return last == 0 ? 0 : rows.begin + (rows.end - rows.begin) * 2 / 3;
}

void CudaState::requireStep(StepArguments const& a) const
{
    requireRange("layer", a.layer, 0, mView.layers - 1);
    requireRange("batch", a.batch, 1, mView.maxBatch);
    requireStream(a.stream);
}

void CudaState::requireGeneration() const
{
    if (mContext)
    {
        throw Failure(TSK_WRONG_STATE, "this is a context pass; expected a generation pass; begin one");
    }
}

void CudaState::requireSelection(int32_t const* selection) const
{
    if (mSeals || selection != nullptr)
    {
        requireAddress("selection", selection, kINDEX_ALIGNMENT);
    }
}

void CudaState::requireDevice() const
{
    if (!mOn)
    {
        throw Failure(TSK_WRONG_STATE, "the state is dry; expected one with a device");
    }
}

void CudaState::prologue(int32_t const* slots, int32_t batch, cudaStream_t stream)
{
    requireGeneration();
    requireAddress("slots", slots, kINDEX_ALIGNMENT);
    requireRange("batch", batch, 1, mView.maxBatch);
    requireStream(stream);
    requireDevice();
    checkCuda(stepPrologue(mView, slots, batch, stream), "prologue");
}

void CudaState::landmarkTopK(StepArguments const& a)
{
    if (mContext)
    {
        contextTopK(a);
        return;
    }
    requireStep(a);
    requireAddress("qkv", a.qkv, kELEMENT_ALIGNMENT);
    requireAddress("positions", a.positions, kINDEX_ALIGNMENT);
    requireAddress("q", a.q, kELEMENT_ALIGNMENT);
    requireSelection(a.selection);
    requireDevice();
    RowGroup const all{0, a.batch};
    checkStage(appendTokens(mView, a.layer, a.qkv, a.positions, a.q, a.batch, a.stream), "append", a.layer, all);
    if (!mSeals)
    {
        if (a.selection != nullptr)
        {
            size_t const bytes = sizeof(int32_t) * static_cast<size_t>(a.batch) * static_cast<size_t>(mView.kvHeads)
                                 * static_cast<size_t>(mView.topK);
            TSK_CUDA(cudaMemsetAsync(a.selection, 0xff, bytes, a.stream)); // all -1
        }
        return;
    }
    cudaStream_t const fetch = mOn->fetch.get();
    checkStage(cudaEventRecord(mOn->entered.get(), a.stream), "record before seal", a.layer, all);
    checkStage(cudaStreamWaitEvent(fetch, mOn->entered.get(), 0), "wait before seal", a.layer, all);
    checkStage(sealChunks(mView, a.layer, a.batch, fetch), "seal", a.layer, all);
    int32_t const count = groups(a.batch);
    int32_t const tail = tailBegin(a.batch);
    cudaStream_t const select = count > 1 ? mOn->select.get() : a.stream;
    for (int32_t g = 0; g < count; ++g)
    {
        RowGroup const rows = group(a.batch, g);
        cudaEvent_t const scored = mOn->scored.get();
        cudaEvent_t const selected = mOn->selected.get();
        checkStage(scoreLandmarks(mView, a.layer, a.q, rows.begin, rows.end, besideFetch(mView), a.stream), "score",
            a.layer, rows);
        if (count > 1)
        {
            checkStage(cudaEventRecord(scored, a.stream), "record before select", a.layer, rows);
            checkStage(cudaStreamWaitEvent(select, scored, 0), "wait before select", a.layer, rows);
        }
        checkStage(
            selectChunks(mView, a.layer, a.selection, rows.begin, rows.end, mOn->selectBytes, count == 1, select),
            "select", a.layer, rows);
        checkStage(cudaEventRecord(selected, select), "record before fetch", a.layer, rows);
        checkStage(cudaStreamWaitEvent(fetch, selected, 0), "wait before fetch", a.layer, rows);
        RowGroup const most{rows.begin, std::min(rows.end, tail)};
        RowGroup const rest{std::max(rows.begin, tail), rows.end};
        checkStage(fetchValues(mView, a.layer, most.begin, most.end, kFETCH_BLOCKS, fetch), "fetch", a.layer, most);
        if (rest.begin < rest.end)
        {
            checkStage(cudaEventRecord(mOn->fetchedMost.get(), fetch), "record after fetch", a.layer, most);
            checkStage(fetchValues(mView, a.layer, rest.begin, rest.end, kFETCH_BLOCKS, fetch), "fetch", a.layer, rest);
        }
    }
    checkStage(cudaEventRecord(mOn->fetchedAll.get(), fetch), "record after fetch", a.layer, all);
    if (count > 1)
    {
        checkStage(cudaStreamWaitEvent(a.stream, mOn->selected.get(), 0), "wait for selection", a.layer, all);
    }
}

void CudaState::keyReconstruct(StepArguments const& a)
{
    if (mContext)
    {
        requireContext(a);
        requireDevice();
        return;
    }
    requireStep(a);
    requireDevice();
    if (mSeals)
    {
        checkStage(
            rebuildKeys(mView, a.layer, 0, a.batch, besideFetch(mView), a.stream), "rebuild", a.layer, {0, a.batch});
    }
}

void CudaState::sparseAttention(StepArguments const& a)
{
    if (mContext)
    {
        contextAttention(a);
        return;
    }
    requireStep(a);
    requireAddress("q", a.q, kELEMENT_ALIGNMENT);
    requireAddress("out", a.out, kELEMENT_ALIGNMENT);
    requireDevice();
    RowGroup const all{0, a.batch};
    checkStage(attendResident(mView, a.layer, a.q, 0, a.batch, besideFetch(mView), mSeals, a.stream), "attend resident",
        a.layer, all);
    if (mSeals)
    {
        RowGroup const most{0, tailBegin(a.batch)};
        RowGroup const rest{most.end, a.batch};
        if (most.end > 0)
        {
            checkStage(cudaStreamWaitEvent(a.stream, mOn->fetchedMost.get(), 0), "wait for fetch", a.layer, most);
            checkStage(
                attendFetched(mView, a.layer, a.q, most.begin, most.end, a.stream), "attend fetched", a.layer, most);
        }
        checkStage(cudaStreamWaitEvent(a.stream, mOn->fetchedAll.get(), 0), "wait for fetch", a.layer, rest);
        checkStage(attendFetched(mView, a.layer, a.q, rest.begin, rest.end, a.stream), "attend fetched", a.layer, rest);
    }
    checkStage(mergePartials(mView, a.out, 0, a.batch, a.stream), "merge", a.layer, all);
}

void CudaState::stage(int32_t stage, RowGroup rows, StepArguments const& a)
{
    requireGeneration();
    requireRange("stage", stage, TSK_STAGE_APPEND, TSK_STAGE_MERGE);
    requireStep(a);
    requireRange("end", rows.end, 1, a.batch);
    requireRange("begin", rows.begin, 0, rows.end - 1);
    auto const uses = [&](std::initializer_list<tsk_stage> stages)
    { return std::find(stages.begin(), stages.end(), stage) != stages.end(); };
    if (uses({TSK_STAGE_APPEND}))
    {
        requireAddress("qkv", a.qkv, kELEMENT_ALIGNMENT);
        requireAddress("positions", a.positions, kINDEX_ALIGNMENT);
    }
    if (uses({TSK_STAGE_APPEND, TSK_STAGE_SCORE, TSK_STAGE_ATTEND_RESIDENT, TSK_STAGE_ATTEND_FETCHED}))
    {
        requireAddress("q", a.q, kELEMENT_ALIGNMENT);
    }
    if (uses({TSK_STAGE_SELECT}))
    {
        requireAddress("selection", a.selection, kINDEX_ALIGNMENT);
    }
    if (uses({TSK_STAGE_MERGE}))
    {
        requireAddress("out", a.out, kELEMENT_ALIGNMENT);
    }
    if (!mSeals && !uses({TSK_STAGE_APPEND, TSK_STAGE_ATTEND_RESIDENT, TSK_STAGE_MERGE}))
    {
        throw Failure(TSK_WRONG_STATE,
            "stage " + std::to_string(stage) + " of a state in which no row is sealed; expected append or attention");
    }
    requireDevice();
    auto const run = [&]() -> cudaError_t
    {
        switch (static_cast<tsk_stage>(stage))
        {
        case TSK_STAGE_APPEND:
            return appendTokens(mView, a.layer, a.qkv, a.positions, a.q, a.batch, a.stream);
        case TSK_STAGE_SEAL:
            return sealChunks(mView, a.layer, a.batch, a.stream);
        case TSK_STAGE_SCORE:
            return scoreLandmarks(mView, a.layer, a.q, rows.begin, rows.end, besideFetch(mView), a.stream);
        case TSK_STAGE_SELECT:
            return selectChunks(mView, a.layer, a.selection, rows.begin, rows.end, mOn->selectBytes, false, a.stream);
        case TSK_STAGE_FETCH:
            return fetchValues(mView, a.layer, rows.begin, rows.end, kFETCH_BLOCKS, a.stream);
        case TSK_STAGE_REBUILD:
            return rebuildKeys(mView, a.layer, rows.begin, rows.end, besideFetch(mView), a.stream);
        case TSK_STAGE_ATTEND_RESIDENT:
            return attendResident(mView, a.layer, a.q, rows.begin, rows.end, besideFetch(mView), false, a.stream);
        case TSK_STAGE_ATTEND_FETCHED:
            return attendFetched(mView, a.layer, a.q, rows.begin, rows.end, a.stream);
        case TSK_STAGE_MERGE:
            return mergePartials(mView, a.out, rows.begin, rows.end, a.stream);
        }
        return cudaErrorInvalidValue;
    };
    checkStage(run(), "stage", a.layer, rows);
}

} // namespace trtllm_shadowkv
