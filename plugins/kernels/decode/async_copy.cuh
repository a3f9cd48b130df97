// Copies from global to shared memory that run while a warp computes.
#pragma once

#include <cstdint>

namespace trtllm_shadowkv::kernels
{

__device__ __forceinline__ uint32_t sharedAddress(void const* p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// For what is read once: it leaves L2 before anything else does.
__device__ __forceinline__ uint64_t evictFirst()
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <int32_t kBYTES>
__device__ __forceinline__ void copyAsync(uint32_t to, void const* from, uint64_t policy)
{
    if constexpr (kBYTES == 16) // not through L1
    {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
            : "memory");
    }
    else
    {
        asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBYTES),
            "l"(policy)
            : "memory");
    }
}

template <int32_t kBYTES>
__device__ __forceinline__ void copyAsync(uint32_t to, void const* from)
{
    if constexpr (kBYTES == 16) // not through L1
    {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
    else
    {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBYTES) : "memory");
    }
}

// Ends a group of copies.
__device__ __forceinline__ void commitCopies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPENDING of the committed groups are under way: the newest ones.
template <uint32_t kPENDING>
__device__ __forceinline__ void waitForCopies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(kPENDING) : "memory");
}

} // namespace trtllm_shadowkv::kernels
