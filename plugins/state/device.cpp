#include "state/device.h"

#include "state/failure.h"

#include <cstdio>
#include <string>

namespace trtllm_shadowkv
{
namespace
{

// 13000 -> "13.0"
std::string dotted(int version)
{
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

} // namespace

int32_t deviceCount()
{
    int count = 0;
    cudaError_t const error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver)
    {
        cudaGetLastError();
        int driver = 0;
        TSK_CUDA(cudaDriverGetVersion(&driver)); // 0 where there is none
        if (driver == 0)
        {
            throw Failure(
                TSK_NO_DRIVER, "no CUDA driver on this machine; a GPU and its driver (libcuda.so.1) are needed");
        }
        throw Failure(TSK_NO_DRIVER, "the CUDA driver is for CUDA " + dotted(driver) + "; expected one for CUDA "
                                         + dotted(CUDART_VERSION) + " or newer: update the driver");
    }
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    {
        cudaGetLastError();
        throw Failure(
            TSK_NO_DEVICE, "no CUDA device that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES");
    }
    checkCuda(error, "cudaGetDeviceCount");
    return count;
}

void requireDevice(int32_t device)
{
    int32_t const count = deviceCount();
    if (device < 0 || device >= count)
    {
        throw Failure(TSK_INVALID_ARGUMENT,
            "device is " + std::to_string(device) + "; expected 0 to " + std::to_string(count - 1));
    }
}

tsk_device deviceInfo(int32_t device)
{
    requireDevice(device);
    cudaDeviceProp properties{};
    TSK_CUDA(cudaGetDeviceProperties(&properties, device));
    tsk_device info{};
    std::snprintf(info.name, sizeof(info.name), "%s", properties.name);
    TSK_CUDA(cudaDeviceGetPCIBusId(info.pci_bus_id, sizeof(info.pci_bus_id), device));
    info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info.l2_bytes = properties.l2CacheSize;
    info.compute_major = properties.major;
    info.compute_minor = properties.minor;
    info.multiprocessors = properties.multiProcessorCount;
    TSK_CUDA(cudaDriverGetVersion(&info.driver_version));
    TSK_CUDA(cudaRuntimeGetVersion(&info.runtime_version));
    return info;
}

} // namespace trtllm_shadowkv
