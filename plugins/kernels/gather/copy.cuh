// 16-byte copies of data that is read once, many in flight a lane.
#pragma once

#include <cstdint>

namespace trtllm_shadowkv::kernels
{

// Volatile with a memory clobber: the compiler may not move a load behind a store. It otherwise does, which leaves one
// load in flight. The data is read once, so it takes no room in L1.
__device__ __forceinline__ uint4 loadOnce(uint64_t address)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address)
        : "memory");
    return v;
}

__device__ __forceinline__ void store(uint64_t address, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :
        : "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

} // namespace trtllm_shadowkv::kernels
