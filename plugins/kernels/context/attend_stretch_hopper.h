#pragma once

#include "kernels/context/context.h"

namespace trtllm_shadowkv::kernels
{

// Whether the library holds code for compute capability 9.0a: see plugins/CMakeLists.txt.
inline constexpr bool kBUILT_FOR_HOPPER =
#if defined(TSK_BUILT_FOR_HOPPER)
    true;
#else
    false;
#endif

// attendStretch() where View::isHopper. The stretch was checked.
cudaError_t attendStretchHopper(
    View const& view, int32_t layer, Stretch const& stretch, void const* q, void* out, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
