// Tables of View::ropeTurns and View::ropeSteps.
#pragma once

#include "kernels/decode/view.h"

#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// Writes the angles of `tokens` positions, 1 to kMAX_TOKENS (rounded up to whole units), in the order of `stream`.
// Angles and their sine and cosine are taken in float64 and rounded to float32. One kernel; never synchronises.
//   inverseFrequencies  device [D / 2]
cudaError_t fillRope(View const& view, float const* inverseFrequencies, int32_t tokens, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
