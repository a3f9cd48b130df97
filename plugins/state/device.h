// What GPUs there are.
#pragma once

#include "state/c_api.h"

#include <cstdint>

namespace trtllm_shadowkv
{

// GPUs that this process may use, at least 1. Throws Failure: TSK_NO_DRIVER, TSK_NO_DEVICE, TSK_CUDA_ERROR.
int32_t deviceCount();

// Throws Failure: as deviceCount, and TSK_INVALID_ARGUMENT where there is no such device.
void requireDevice(int32_t device);

// Throws Failure: as requireDevice.
tsk_device deviceInfo(int32_t device);

} // namespace trtllm_shadowkv
