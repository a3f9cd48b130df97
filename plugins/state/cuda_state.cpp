#include "state/cuda_state.h"

#include "kernels/context/attend_stretch_hopper.h"
#include "kernels/decode/decode.h"
#include "kernels/decode/reset.h"
#include "state/device.h"
#include "state/require.h"
#include "state/state_device.h"

#include <algorithm>
#include <string>
#include <type_traits>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

constexpr int32_t kMIN_CAPABILITY = 8; // bfloat16 tensor cores

View withDevice(View view, int32_t device)
{
    if (device < 0)
    {
        return view;
    }
    tsk_device const info = deviceInfo(device);
    if (info.compute_major < kMIN_CAPABILITY)
    {
        throw Failure(TSK_INVALID_ARGUMENT, std::string(info.name) + " has compute capability "
                                                + std::to_string(info.compute_major) + "."
                                                + std::to_string(info.compute_minor) + "; expected 8.0 or higher");
    }
    view.multiprocessors = info.multiprocessors;
    view.startsEarly = info.compute_major >= 9;
    view.isHopper = kernels::kBUILT_FOR_HOPPER && info.compute_major == 9 && info.compute_minor == 0;
    return view;
}

template <typename T>
void copyToDevice(T* to, T const* from, size_t count, cudaStream_t stream)
{
    static_assert(std::is_trivially_copyable_v<T>);
    if (count > 0)
    {
        // From pageable memory: the bytes have been read when the call returns.
        TSK_CUDA(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream));
    }
}

uint64_t addressOf(void const* pointer)
{
    return reinterpret_cast<uint64_t>(pointer);
}

} // namespace

std::unique_ptr<CudaState> CudaState::create(tsk_state_config const& config)
{
    requireConfig(config);
    if (config.device >= 0)
    {
        trtllm_shadowkv::requireDevice(config.device);
    }
    DeviceGuard const guard(config.device);
    return std::unique_ptr<CudaState>(new CudaState(config));
}

CudaState::CudaState(tsk_state_config const& config)
    : mDevice(config.device), mRowGroups(config.row_groups), mConfig(config), mSeals(anyRowSeals(config)),
      mRule(sealRule(config)), mView(withDevice(sizesOf(config), config.device)),
      mBytes(bytesOf(mView, config.max_tokens).total()), mBook(mView, mRule, config.max_tokens)
{
    mConfig.inverse_frequencies = nullptr; // the caller's
    if (mDevice >= 0)
    {
        int32_t const chunks = mSeals ? mRule.sealedChunks(config.max_tokens) : 0;
        mOn = std::make_unique<Device>(mView, config, chunks);
    }
}

CudaState::~CudaState()
{
    if (mOn)
    {
        cudaDeviceSynchronize(); // nobody is left to hear of an error
    }
}

void CudaState::requireOpsOf(tsk_state_config const& ops) const
{
    auto const requireSame = [](char const* name, int32_t found, int32_t expected)
    {
        requireThat(found == expected, std::string(name) + " is " + std::to_string(found),
            std::to_string(expected) + ", for which the state was made");
    };
    requireRange("layer", ops.num_layers - 1, 0, mConfig.num_layers - 1);
    requireSame("num_heads", ops.num_heads, mConfig.num_heads);
    requireSame("num_kv_heads", ops.num_kv_heads, mConfig.num_kv_heads);
    requireSame("head_size", ops.head_size, mConfig.head_size);
    requireSame("chunk_size", ops.chunk_size, mConfig.chunk_size);
    requireSame("rank", ops.rank, mConfig.rank);
    requireSame("top_k", ops.top_k, mConfig.top_k);
    requireSame("outliers", ops.outliers, mConfig.outliers);
    if (ops.element != kANY_ELEMENT)
    {
        requireSame("element (0 float16, 1 bfloat16)", ops.element, mConfig.element);
    }
}

tsk_buffers CudaState::describe() const
{
    View const& v = mView;
    tsk_buffers b{};
    b.element = static_cast<int32_t>(v.element);
    b.landmark_format = static_cast<int32_t>(v.landmarkFormat);
    b.value_format = static_cast<int32_t>(v.valueFormat);
    b.layers = v.layers;
    b.heads = v.heads;
    b.kv_heads = v.kvHeads;
    b.group = v.group;
    b.head_size = v.headSize;
    b.chunk_size = v.chunkSize;
    b.chunk_shift = v.chunkShift;
    b.rank = v.rank;
    b.top_k = v.topK;
    b.outliers = v.outliers;
    b.window = v.window;
    b.cache_slots = v.cacheSlots;
    b.slots = v.slots;
    b.sealed_rows = v.sealedRows;
    b.max_batch = v.maxBatch;
    b.live_pages = v.livePages;
    b.sealed_pages = v.sealedPages;
    b.live_table_stride = v.liveTableStride;
    b.sealed_table_stride = v.sealedTableStride;
    b.multiprocessors = v.multiprocessors;
    b.logit_stride = v.logitStride;
    b.scale = v.scale;
    b.ring = mSeals ? mRule.ring() : 0;
    b.rows = addressOf(v.rows);
    b.live_table = addressOf(v.liveTable);
    b.sealed_table = addressOf(v.sealedTable);
    b.value_region = addressOf(v.valueRegion);
    b.counters = addressOf(v.counters);
    b.residuals = addressOf(v.residuals);
    b.fault = addressOf(v.fault);
    b.live = addressOf(v.live);
    b.factor_a = addressOf(v.factorA);
    b.landmarks = addressOf(v.landmarks);
    b.landmark_scales = addressOf(v.landmarkScales);
    b.value_scales = addressOf(v.valueScales);
    b.excluded = addressOf(v.excluded);
    b.factor_b = addressOf(v.factorB);
    b.centres = addressOf(v.centres);
    b.outlier_ids = addressOf(v.outlierIds);
    b.outlier_keys = addressOf(v.outlierKeys);
    b.outlier_values = addressOf(v.outlierValues);
    b.cache_keys = addressOf(v.cacheKeys);
    b.cache_values = addressOf(v.cacheValues);
    b.cache_order = addressOf(v.cacheOrder);
    b.rope_turns = addressOf(v.ropeTurns);
    b.rope_steps = addressOf(v.ropeSteps);
    b.steps = addressOf(v.steps);
    b.logits = addressOf(v.logits);
    b.logit_sums = addressOf(v.logitSums);
    b.hit_counts = addressOf(v.hitCounts);
    b.miss_counts = addressOf(v.missCounts);
    b.entries = addressOf(v.entries);
    b.partials = addressOf(v.partials);
    b.device_bytes = mBytes;
    return b;
}

void CudaState::requireIdle(cudaStream_t stream) const
{
    requireStream(stream);
    if (!mOn)
    {
        return;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    TSK_CUDA(cudaStreamIsCapturing(stream, &status));
    if (status != cudaStreamCaptureStatusNone)
    {
        throw Failure(TSK_WRONG_STATE, "stream is capturing; expected a stream that is not; call this between steps");
    }
}

// The row's tables, then the row itself, as the device is to see them.
void CudaState::upload(int32_t slot, BookRow const& row, cudaStream_t stream) const
{
    size_t const s = static_cast<size_t>(slot);
    Row device{};
    device.length = row.length;
    device.published = row.published;
    device.sealing = -1;
    device.sealedRow = row.sealed ? row.sealedRow.front() : -1;
    device.topK = row.topK;
    device.outliers = std::min(mView.outliers, row.published);
    device.ring = static_cast<int32_t>(row.livePages.size());
    device.valueStride = row.valueStride;
    copyToDevice(mView.liveTable + s * static_cast<size_t>(mView.liveTableStride), row.livePages.data(),
        row.livePages.size(), stream);
    copyToDevice(mView.sealedTable + s * static_cast<size_t>(mView.sealedTableStride), row.sealedPages.data(),
        row.sealedPages.size(), stream);
    copyToDevice(mView.rows + s, &device, 1, stream);
}

void CudaState::allocate(int32_t slot, RowRequest const& request, cudaStream_t stream)
{
    requireIdle(stream);
    BookRow const& row = mBook.allocate(slot, request);
    if (!mOn)
    {
        return;
    }
    orRelease(slot,
        [&]
        {
            upload(slot, row, stream);
            if (row.canSeal)
            {
                size_t const layers = static_cast<size_t>(mView.layers);
                copyToDevice(
                    mView.valueRegion + static_cast<size_t>(slot) * layers, request.valueAddresses, layers, stream);
            }
            int32_t const sealedRow = row.canSeal ? row.sealedRow.front() : -1;
            TSK_CUDA(resetRow(mView, slot, sealedRow, static_cast<int32_t>(row.sealedPages.size()), stream));
        });
}

void CudaState::load(int32_t slot, int32_t length, cudaStream_t stream)
{
    requireIdle(stream);
    BookRow const& row = mBook.load(slot, length);
    if (!mOn)
    {
        return;
    }
    orRelease(slot, [&] { upload(slot, row, stream); });
}

void CudaState::release(int32_t slot)
{
    mBook.release(slot);
}

tsk_row CudaState::row(int32_t slot) const
{
    BookRow const& book = mBook.at(slot);
    tsk_row row{};
    row.length = book.length;
    row.prompt_tokens = book.promptTokens;
    row.total_tokens = book.totalTokens;
    row.top_k = book.topK;
    row.dense = book.dense;
    row.loaded = book.loaded;
    row.sealed = book.sealed;
    row.must_seal = mBook.mustSeal(book);
    row.published = book.published;
    row.prompt_chunks = book.promptChunks;
    row.live_pages = static_cast<int32_t>(book.livePages.size());
    row.sealed_pages = static_cast<int32_t>(book.sealedPages.size());
    row.sealed_row = book.canSeal ? book.sealedRow.front() : -1;
    row.value_stride = book.valueStride;
    return row;
}

std::vector<int32_t> const& CudaState::pages(int32_t slot, int32_t kind) const
{
    requireRange("kind", kind, 0, 1);
    BookRow const& row = mBook.at(slot);
    return kind == 0 ? row.livePages : row.sealedPages;
}

tsk_statistics CudaState::statistics(int32_t slot, cudaStream_t stream) const
{
    BookRow const& row = mBook.at(slot);
    requireIdle(stream);
    tsk_statistics sums{};
    sums.sealed_tokens = int64_t{row.published} * mView.chunkSize;
    sums.generated_sealed = int64_t{row.published - row.promptChunks} * mView.chunkSize;
    if (!mOn)
    {
        return sums;
    }
    Counters counters{};
    std::vector<Residual> residuals(static_cast<size_t>(mView.layers));
    TSK_CUDA(cudaMemcpyAsync(&counters, mView.counters + slot, sizeof(counters), cudaMemcpyDeviceToHost, stream));
    TSK_CUDA(cudaMemcpyAsync(residuals.data(), mView.residuals + static_cast<size_t>(slot) * residuals.size(),
        residuals.size() * sizeof(Residual), cudaMemcpyDeviceToHost, stream));
    TSK_CUDA(cudaStreamSynchronize(stream));
    sums.hits = static_cast<int64_t>(counters.hits);
    sums.misses = static_cast<int64_t>(counters.misses);
    sums.bytes_fetched = sums.misses * valueChunkBytes(mView);
    for (Residual const& residual : residuals)
    {
        sums.residual_lost += static_cast<double>(residual.lost);
        sums.residual_total += static_cast<double>(residual.total);
    }
    return sums;
}

uint32_t CudaState::fault(cudaStream_t stream)
{
    requireIdle(stream);
    uint32_t bits = 0;
    if (mOn)
    {
        TSK_CUDA(cudaMemcpyAsync(&bits, mView.fault, sizeof(bits), cudaMemcpyDeviceToHost, stream));
        TSK_CUDA(cudaMemsetAsync(mView.fault, 0, sizeof(bits), stream));
        TSK_CUDA(cudaStreamSynchronize(stream));
    }
    return bits;
}

void CudaState::poison()
{
    if (mOn)
    {
        mOn->memory.poison(mView, mBook.used() == 0, mOn->select.get());
        TSK_CUDA(cudaStreamSynchronize(mOn->select.get()));
    }
}

void CudaState::beginGeneration(int32_t const* slots, int32_t batch, int32_t* positions)
{
    mBook.beginGeneration(slots, batch);
    mContext.reset();
    for (int32_t b = 0; positions != nullptr && b < batch; ++b)
    {
        positions[b] = slots[b] == -1 ? 0 : mBook.at(slots[b]).length - 1;
    }
}

} // namespace trtllm_shadowkv
