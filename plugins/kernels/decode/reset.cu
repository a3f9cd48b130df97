#include "kernels/decode/reset.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 256;

// A block for each KV head and layer.
__global__ void __launch_bounds__(kTHREADS) resetKernel(View const view, int32_t slot, int32_t sealedRow, int32_t pages)
{
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const head = static_cast<int32_t>(blockIdx.x);
    size_t const layer = blockIdx.y;
    if (thread == 0 && head == 0)
    {
        view.residuals[size_t{static_cast<uint32_t>(slot)} * view.layers + layer] = Residual{0.0F, 0.0F};
        if (layer == 0)
        {
            view.counters[slot] = Counters{0, 0};
        }
    }
    if (sealedRow < 0)
    {
        return;
    }
    Entry* const order
        = view.cacheOrder + ((layer * view.sealedRows + sealedRow) * view.kvHeads + head) * view.cacheSlots;
    for (int32_t i = thread; i < view.cacheSlots; i += kTHREADS)
    {
        order[i] = Entry{-1, i};
    }
    int32_t const words = kSEALED_PAGE_TOKENS / kSCORE_CHUNKS >> view.chunkShift; // of a page and head
    int32_t const* const table = view.sealedTable + size_t{static_cast<uint32_t>(slot)} * view.sealedTableStride;
    for (int32_t i = thread; i < pages * words; i += kTHREADS)
    {
        int32_t const page = table[i / words];
        view.excluded[((layer * view.sealedPages + page) * view.kvHeads + head) * words + i % words] = 0;
    }
}

} // namespace

cudaError_t resetRow(View const& view, int32_t slot, int32_t sealedRow, int32_t pages, cudaStream_t stream)
{
    dim3 const grid(static_cast<uint32_t>(view.kvHeads), static_cast<uint32_t>(view.layers));
    return launch(resetKernel, grid, kTHREADS, 0, stream, view, slot, sealedRow, pages);
}

} // namespace trtllm_shadowkv::kernels
