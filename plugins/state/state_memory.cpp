#include "state/state_memory.h"

#include "kernels/context/context.h"
#include "kernels/decode/rope_table.h"
#include "state/failure.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

constexpr size_t kALIGNMENT = 256; // bytes: where every array begins
constexpr uint64_t kMAX_ARRAY = uint64_t{1} << 46;
constexpr int64_t kSEAL_SCRATCH = int64_t{1} << 27; // bytes: layers sealed at once share that, one at least
constexpr int kPOISON = 0xff;                       // NaN in every floating-point type here, -1 in integers

// Hands out parts of one block. Without a block it only counts, and every address is null.
class Bump
{
public:
    explicit Bump(std::byte* base = nullptr) : mBase(base)
    {
    }

    // An array of the product of `sizes` elements of `bytes` bytes; null where a size is 0.
    void* take(size_t bytes, std::initializer_list<int64_t> sizes)
    {
        uint64_t total = bytes;
        for (int64_t const size : sizes)
        {
            if (__builtin_mul_overflow(total, static_cast<uint64_t>(size), &total) || total > kMAX_ARRAY)
            {
                throw Failure(TSK_INVALID_ARGUMENT, "an array of the state has more than " + std::to_string(kMAX_ARRAY)
                                                        + " bytes; expected fewer layers, pages or rows");
            }
        }
        if (total == 0)
        {
            return nullptr;
        }
        size_t const at = mUsed;
        mUsed += (total + kALIGNMENT - 1) / kALIGNMENT * kALIGNMENT;
        return mBase == nullptr ? nullptr : mBase + at;
    }

    template <typename T>
    void place(T*& array, std::initializer_list<int64_t> sizes)
    {
        array = static_cast<T*>(take(sizeof(T), sizes));
    }

    size_t used() const noexcept
    {
        return mUsed;
    }

private:
    std::byte* mBase;
    size_t mUsed{0};
};

void placeKept(View& v, Bump& kept)
{
    int64_t const words = kSEALED_PAGE_TOKENS / v.chunkSize / kSCORE_CHUNKS;
    kept.place(v.rows, {v.slots});
    kept.place(v.liveTable, {v.slots, v.liveTableStride});
    kept.place(v.sealedTable, {v.slots, v.sealedTableStride});
    kept.place(v.valueRegion, {v.slots, v.layers});
    kept.place(v.counters, {v.slots});
    kept.place(v.residuals, {v.slots, v.layers});
    kept.place(v.fault, {1});
    kept.place(v.excluded, {v.layers, v.sealedPages, v.kvHeads, words});
    kept.place(v.cacheOrder, {v.layers, v.sealedRows, v.kvHeads, v.cacheSlots});
    kept.place(v.steps, {v.maxBatch});
}

void placeRope(View& v, Bump& kept, int64_t maxTokens)
{
    kept.place(v.ropeTurns, {(maxTokens + kUNIT - 1) / kUNIT, v.headSize / 2, 2});
    kept.place(v.ropeSteps, {kUNIT, v.headSize / 2, 2});
}

void placePools(View& v, Bump& pools)
{
    size_t const element = 2;
    size_t const landmark = v.landmarkFormat == Format::kE4M3 ? 1 : element;
    int64_t const perPage = kSEALED_PAGE_TOKENS / v.chunkSize;
    v.live = pools.take(element, {v.layers, v.livePages, 2, v.kvHeads, kLIVE_PAGE_TOKENS, v.headSize});
    v.factorA = pools.take(element, {v.layers, v.sealedPages, kSEALED_PAGE_TOKENS, v.rank});
    v.landmarks = pools.take(landmark, {v.layers, v.sealedPages, v.kvHeads, perPage, v.headSize});
    if (v.landmarkFormat == Format::kE4M3)
    {
        pools.place(v.landmarkScales, {v.layers, v.sealedPages, v.kvHeads, perPage});
        pools.place(v.centres, {v.layers, v.sealedRows, v.kvHeads, v.headSize});
    }
    if (v.valueFormat == Format::kE4M3)
    {
        pools.place(v.valueScales, {v.layers, v.sealedPages, v.kvHeads, perPage});
    }
    v.factorB = pools.take(element, {v.layers, v.sealedRows, v.kvHeads, v.headSize, v.rank});
    pools.place(v.outlierIds, {v.layers, v.sealedRows, v.kvHeads, v.outliers});
    v.outlierKeys = pools.take(element, {v.layers, v.sealedRows, v.kvHeads, v.outliers, v.chunkSize, v.headSize});
    v.outlierValues = pools.take(element, {v.layers, v.sealedRows, v.kvHeads, v.outliers, v.chunkSize, v.headSize});
    v.cacheKeys = pools.take(element, {v.layers, v.sealedRows, v.kvHeads, v.cacheSlots, v.chunkSize, v.headSize});
    v.cacheValues
        = pools.take(static_cast<size_t>(valueChunkBytes(v)), {v.layers, v.sealedRows, v.kvHeads, v.cacheSlots});
}

void placeScratch(View& v, Bump& scratch)
{
    // A sealed page holds the chunks of whole score items, and every published chunk lies in a page of its row's own.
    int64_t const items = int64_t{v.sealedPages} * (kSEALED_PAGE_TOKENS / v.chunkSize / kSCORE_CHUNKS);
    int64_t const fixed = int64_t{v.maxBatch} * v.kvHeads * (splitsOf(v.outliers, v) + 2 * splitsOf(v.topK, v));
    scratch.place(v.logits, {items, v.kvHeads, kSCORE_CHUNKS, v.logitStride});
    scratch.place(v.logitSums, {items, v.kvHeads, v.logitStride, 2});
    scratch.place(v.hitCounts, {v.maxBatch, v.kvHeads});
    scratch.place(v.missCounts, {v.maxBatch, v.kvHeads});
    scratch.place(v.entries, {v.maxBatch, v.kvHeads, v.topK});
    scratch.place(v.partials, {fixedPartials(v) + fixed, v.group, v.headSize + 2});
}

size_t sealBytes(View const& v, int64_t maxTokens)
{
    if (v.sealedRows == 0)
    {
        return 0;
    }
    int64_t const layer = sealScratchBytes(v, static_cast<int32_t>(maxTokens / v.chunkSize));
    return static_cast<size_t>(layer * std::clamp<int64_t>(kSEAL_SCRATCH / layer, 1, v.layers));
}

std::unique_ptr<DeviceArray<std::byte>> takeBlock(size_t bytes, char const* what)
{
    try
    {
        return std::make_unique<DeviceArray<std::byte>>(bytes);
    }
    catch (Failure const& failure)
    {
        throw Failure(failure.status(), "the state's " + std::string(what) + ", " + std::to_string(bytes)
                                            + " bytes of device memory, cannot be had; expected as much to be free; "
                                            + failure.what());
    }
}

StateBytes layOut(View& v, int64_t maxTokens, Bump kept, Bump pools, Bump scratch)
{
    placeKept(v, kept);
    placeRope(v, kept, maxTokens);
    placePools(v, pools);
    placeScratch(v, scratch);
    return {kept.used(), pools.used(), std::max(scratch.used(), sealBytes(v, maxTokens))};
}

} // namespace

StateBytes bytesOf(View const& sizes, int32_t maxTokens)
{
    View counted = sizes;
    return layOut(counted, maxTokens, Bump(), Bump(), Bump());
}

StateMemory::StateMemory(View& view, float const* inverseFrequencies, int32_t maxTokens)
{
    StateBytes const bytes = bytesOf(view, maxTokens);
    mKept = takeBlock(bytes.kept, "tables");
    mScratch = takeBlock(bytes.scratch, "scratch memory");
    mPools = takeBlock(bytes.pools, "pools");
    layOut(view, maxTokens, Bump(mKept->data()), Bump(mPools->data()), Bump(mScratch->data()));

    DeviceArray<float> const frequencies(
        std::vector<float>(inverseFrequencies, inverseFrequencies + view.headSize / 2));
    Stream const stream;
    TSK_CUDA(cudaMemsetAsync(mKept->data(), 0, mKept->bytes(), stream.get()));
    size_t const counts = size_t{4} * static_cast<size_t>(view.maxBatch) * static_cast<size_t>(view.kvHeads);
    TSK_CUDA(cudaMemsetAsync(view.hitCounts, 0, counts, stream.get()));
    TSK_CUDA(cudaMemsetAsync(view.missCounts, 0, counts, stream.get()));
    TSK_CUDA(fillRope(view, frequencies.data(), maxTokens, stream.get()));
    TSK_CUDA(cudaStreamSynchronize(stream.get()));
}

void StateMemory::poison(View const& view, bool pools, cudaStream_t stream) const
{
    if (pools)
    {
        TSK_CUDA(cudaMemsetAsync(mPools->data(), kPOISON, mPools->bytes(), stream));
    }
    TSK_CUDA(cudaMemsetAsync(mScratch->data(), kPOISON, mScratch->bytes(), stream));
    if (view.sealedRows == 0)
    {
        // Nobody ever writes them again, and attention reads them.
        size_t const counts = size_t{4} * static_cast<size_t>(view.maxBatch) * static_cast<size_t>(view.kvHeads);
        TSK_CUDA(cudaMemsetAsync(view.hitCounts, 0, counts, stream));
        TSK_CUDA(cudaMemsetAsync(view.missCounts, 0, counts, stream));
    }
}

} // namespace trtllm_shadowkv
