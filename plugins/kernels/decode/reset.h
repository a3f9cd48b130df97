// What a row finds when it gets its slot.
#pragma once

#include "kernels/decode/view.h"

#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// Zeroes the counters and residuals of `slot`, makes the chunk cache of `sealedRow` empty (-1: it has none), and clears
// the outlier bits of the first `pages` entries of the slot's table of sealed pages. One kernel; never synchronises.
cudaError_t resetRow(View const& view, int32_t slot, int32_t sealedRow, int32_t pages, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
