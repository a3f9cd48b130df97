// The kernels that read a prompt, stretch by stretch, and seal it.
//
// Values of chunks that will be sealed go to the value region with the stretch that completes them, on the fetch stream
// beside the attention of the same layer: when a prompt is sealed, its values are there.
#include "kernels/context/context.h"

#include "state/require.h"
#include "state/state_device.h"

#include <algorithm>
#include <string>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

// Throws Failure that names the work: "gram of layers 0 to 31 of slot 3: ...".
void checkSeal(cudaError_t error, char const* what, Seal const& seal)
{
    if (error != cudaSuccess)
    {
        std::string const where = std::string(what) + " of layers " + std::to_string(seal.layerBegin) + " to "
                                  + std::to_string(seal.layerEnd - 1) + " of slot " + std::to_string(seal.slot);
        checkCuda(error, where.c_str());
    }
}

} // namespace

void CudaState::beginContext(int32_t slot, int32_t start, int32_t length, cudaStream_t stream)
{
    requireIdle(stream);
    int32_t const before = mBook.at(slot).stored;
    BookRow const& row = mBook.beginContext(slot, start, length);
    mContext.reset();
    if (mOn && row.loaded)
    {
        orRelease(slot, [&] { upload(slot, row, stream); }); // the length, for the first step
    }
    mContext = Context{{slot, start, length}, before, row.stored, row.valueStride};
}

int32_t CudaState::tokensOf(int32_t rows) const
{
    if (mContext)
    {
        requireRange("rows of a context pass", rows, 1, 1);
        return mContext->stretch.length;
    }
    return rows;
}

void CudaState::requireContext(StepArguments const& a) const
{
    requireRange("layer", a.layer, 0, mView.layers - 1);
    requireRange("batch", a.batch, mContext->stretch.length, mContext->stretch.length);
    requireStream(a.stream);
}

void CudaState::contextTopK(StepArguments const& a)
{
    requireContext(a);
    requireAddress("qkv", a.qkv, kELEMENT_ALIGNMENT);
    requireAddress("positions", a.positions, kINDEX_ALIGNMENT);
    requireAddress("q", a.q, kELEMENT_ALIGNMENT);
    if (a.selection != nullptr)
    {
        requireAddress("selection", a.selection, kINDEX_ALIGNMENT);
    }
    requireDevice();
    Context const& c = *mContext;
    RowGroup const all{0, 1};
    checkStage(appendStretch(mView, a.layer, c.stretch, a.qkv, a.positions, a.q, a.stream), "append", a.layer, all);
    if (a.selection != nullptr)
    {
        size_t const bytes = sizeof(int32_t) * static_cast<size_t>(mView.kvHeads) * static_cast<size_t>(mView.topK);
        TSK_CUDA(cudaMemsetAsync(a.selection, 0xff, bytes, a.stream)); // all -1
    }
    if (c.storeBegin < c.storeEnd)
    {
        cudaStream_t const fetch = mOn->fetch.get();
        checkStage(cudaEventRecord(mOn->entered.get(), a.stream), "record before store", a.layer, all);
        checkStage(cudaStreamWaitEvent(fetch, mOn->entered.get(), 0), "wait before store", a.layer, all);
        checkStage(storeValues(mView, a.layer, c.stretch.slot, c.valueStride, c.storeBegin, c.storeEnd, fetch),
            "store values", a.layer, all);
        checkStage(cudaEventRecord(mOn->fetchedAll.get(), fetch), "record after store", a.layer, all);
    }
}

void CudaState::contextAttention(StepArguments const& a)
{
    requireContext(a);
    requireAddress("q", a.q, kELEMENT_ALIGNMENT);
    requireAddress("out", a.out, kELEMENT_ALIGNMENT);
    requireDevice();
    Context const& c = *mContext;
    RowGroup const all{0, 1};
    checkStage(attendStretch(mView, a.layer, c.stretch, a.q, a.out, a.stream), "attend", a.layer, all);
    if (c.storeBegin < c.storeEnd)
    {
        checkStage(cudaStreamWaitEvent(a.stream, mOn->fetchedAll.get(), 0), "wait for store", a.layer, all);
    }
}

void CudaState::sealLayers(Seal const& seal, cudaStream_t stream)
{
    checkSeal(measureKeys(mView, seal, stream), "measuring keys", seal);
    checkSeal(writeLandmarks(mView, seal, stream), "landmarks", seal);
    checkSeal(writeOutliers(mView, seal, stream), "outliers", seal);
    checkSeal(unrotateKeys(mView, seal, stream), "un-rotating keys", seal); // nothing before may run after it
    checkSeal(computeGram(mView, seal, stream), "Gram matrix", seal);
    checkSeal(findBasis(mView, seal, stream), "basis", seal);
    checkSeal(projectPrompt(mView, seal, stream), "projection", seal);
}

void CudaState::sealPrompt(int32_t slot, cudaStream_t stream)
{
    requireIdle(stream);
    BookRow const& before = mBook.sealable(slot);
    if (mOn)
    {
        int32_t const chunks = mRule.sealedChunks(int64_t{before.length} + 1);
        Seal seal{};
        seal.slot = slot;
        seal.sealedRow = before.sealedRow.front();
        seal.chunks = chunks;
        seal.outliers = std::min(mView.outliers, chunks);
        seal.scratch = mOn->memory.scratch();
        int64_t const fit = static_cast<int64_t>(mOn->memory.scratchBytes()) / sealScratchBytes(mView, chunks);
        int32_t const step = static_cast<int32_t>(std::min<int64_t>(mView.layers, fit)); // at least 1: see StateMemory
        cudaStream_t const fetch = mOn->fetch.get();
        TSK_CUDA(cudaEventRecord(mOn->entered.get(), stream));
        TSK_CUDA(cudaStreamWaitEvent(fetch, mOn->entered.get(), 0));
        for (int32_t layer = 0; layer < mView.layers && before.stored < chunks; ++layer)
        {
            checkStage(storeValues(mView, layer, slot, before.valueStride, before.stored, chunks, fetch),
                "store values", layer, {0, 1});
        }
        TSK_CUDA(cudaEventRecord(mOn->fetchedAll.get(), fetch));
        // A row that is sealed in part has keys that are un-rotated.
        orRelease(slot,
            [&]
            {
                for (int32_t layer = 0; layer < mView.layers; layer += step)
                {
                    seal.layerBegin = layer;
                    seal.layerEnd = std::min(mView.layers, layer + step);
                    sealLayers(seal, stream);
                }
            });
        TSK_CUDA(cudaStreamWaitEvent(stream, mOn->fetchedAll.get(), 0));
    }
    BookRow const& row = mBook.seal(slot);
    if (!mOn)
    {
        return;
    }
    // After the kernels, which look tokens up in the table as it was.
    orRelease(slot, [&] { upload(slot, row, stream); });
}

} // namespace trtllm_shadowkv
