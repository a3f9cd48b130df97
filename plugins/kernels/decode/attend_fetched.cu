#include "kernels/decode/attend.cuh"
#include "kernels/decode/decode.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

// Splits for which there is a block: half of them, because mostly fewer than half of the chunks are missing, and a
// block that finds nothing to do is not free.
constexpr int32_t kSPLITS_A_BLOCK = 2;

// grid: splits, KV heads, batch rows.
template <typename T, int32_t D, int32_t NT>
__global__ void __launch_bounds__(kATTEND_THREADS, kATTEND_BLOCKS)
    fetchedKernel(__grid_constant__ View const view, int32_t layer, T const* q, int32_t begin)
{
    __shared__ AttendShared<D, NT> shared;
    int32_t const head = blockIdx.y;
    int32_t const row = begin + static_cast<int32_t>(blockIdx.z);
    if (view.steps[row].row.sealedRow < 0)
    {
        return; // and nobody has written the count
    }
    int32_t const tokens = view.missCounts[row * view.kvHeads + head] << view.chunkShift;
    for (int32_t split = blockIdx.x; split * kSPLIT_TOKENS < tokens; split += static_cast<int32_t>(gridDim.x))
    {
        Span const span{Part::kMISSES, row, head, split, min(tokens - split * kSPLIT_TOKENS, kSPLIT_TOKENS)};
        attendSpan<T, D, NT>(view, layer, q, span, shared);
    }
}

} // namespace

cudaError_t attendFetched(
    View const& view, int32_t layer, void const* q, int32_t begin, int32_t end, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    return dispatchAttend(view,
        [&](auto tag, auto size, auto tiles) -> cudaError_t
        {
            using T = decltype(tag);
            auto const kernel = fetchedKernel<T, decltype(size)::value, decltype(tiles)::value>;
            int32_t const blocks = (splitsOf(view.topK, view) + kSPLITS_A_BLOCK - 1) / kSPLITS_A_BLOCK;
            dim3 const grid(
                static_cast<uint32_t>(blocks), static_cast<uint32_t>(view.kvHeads), static_cast<uint32_t>(end - begin));
            return launch(kernel, grid, kATTEND_THREADS, 0, stream, view, layer, static_cast<T const*>(q), begin);
        });
}

} // namespace trtllm_shadowkv::kernels
