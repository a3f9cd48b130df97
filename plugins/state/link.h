// Speed of the link between host memory and a GPU, for chunks at random addresses.
#pragma once

#include <cstdint>

namespace trtllm_shadowkv
{

inline constexpr int64_t kLINK_MIN_FOOTPRINT = int64_t{1} << 24;
inline constexpr int64_t kLINK_MAX_FOOTPRINT = int64_t{1} << 36;

// See tsk_measure_link in state/c_api.h. The result is in 10^9 bytes a second. Changes the calling thread's current
// device. Throws Failure.
double measureLink(int32_t device, int64_t chunkBytes, int64_t footprintBytes);

} // namespace trtllm_shadowkv
