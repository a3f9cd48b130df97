// Instructions that C++ has no words for, one function each. Inline assembly is here and in hopper.cuh alone.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace trtllm_shadowkv::kernels
{

inline constexpr uint32_t kFULL_WARP = 0xffffffffU;

// --- loads and stores ---------------------------------------------------------------------------------------------------

// Read once and not again soon: no room in L1. (ptxas takes L2::evict_first in a load only with 32-byte vectors.)
__device__ __forceinline__ uint4 loadStream(void const* address)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
    return v;
}

__device__ __forceinline__ uint2 loadStream2(void const* address)
{
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

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

// From shared memory each time: the compiler would otherwise keep all of it in registers.
__device__ __forceinline__ uint4 loadShared(uint4 const& piece)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(&piece)))
        : "memory");
    return v;
}

// Brings the line of an address into L2.
__device__ __forceinline__ void prefetchL2(void const* address)
{
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// The same address, of which the compiler knows nothing.
__device__ __forceinline__ char const* opaque(char const* address)
{
    asm("" : "+l"(address));
    return address;
}

// Shared memory whose size the launch names, one array a kernel.
template <typename T>
__device__ __forceinline__ T* dynamicShared()
{
    extern __shared__ __align__(16) unsigned char dynamicSharedMemory[];
    return reinterpret_cast<T*>(dynamicSharedMemory);
}

// --- copies from global to shared memory that run while a warp computes ---------------------------------------------------

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

// 16 bytes in shared memory: the first `bytes` of them copied, 0 to 16, the others zero.
__device__ __forceinline__ void copyAsyncPart(uint32_t to, void const* from, int32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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

// --- arithmetic ---------------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t r;
    if constexpr (std::is_same_v<T, __half>)
    {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    else
    {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}

// Flushes to zero far below what 16 bits can hold; -inf gives 0, NaN stays.
__device__ __forceinline__ float powerOfTwo(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// --- tensor cores -------------------------------------------------------------------------------------------------------

// d += A B, A [16, 16] row by row, B [16, 8] column by column, d [16, 8] float32. With lane (g, t):
//   a[0]: A[g][2t, 2t+1]  a[1]: A[g+8][2t, 2t+1]  a[2]: A[g][2t+8, 2t+9]  a[3]: A[g+8][2t+8, 2t+9]
//   b0: B[2t, 2t+1][g]    b1: B[2t+8, 2t+9][g]    d[0], d[1]: D[g][2t, 2t+1]  d[2], d[3]: D[g+8][2t, 2t+1]
template <typename T>
__device__ __forceinline__ void mma(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    else
    {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// Transposes an 8 x 8 matrix of 2-byte elements: lane (g, t) gives M[g][2t, 2t+1] and gets M[2t][g], M[2t+1][g].
__device__ __forceinline__ uint32_t transpose8x8(uint32_t v)
{
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// Four 8 x 8 matrices of 2-byte elements from shared memory. Lane i gives the address of row i % 8, 16 bytes, of matrix
// i / 8; lane (g, t) gets elements 2t, 2t + 1 of row g of each.
__device__ __forceinline__ void loadMatrices(uint32_t (&r)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(row)
        : "memory");
}

// The same, each transposed: lane (g, t) gets elements g of rows 2t, 2t + 1.
__device__ __forceinline__ void loadTransposed(uint32_t (&r)[4], uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(row)
        : "memory");
}

// --- order of kernels, see launch.cuh ----------------------------------------------------------------------------------

// Waits until the kernel before has ended and what it wrote can be read.
__device__ __forceinline__ void afterPrevious()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once a thread of every block has called it, or the block has ended, the next kernel's blocks start where there is room.
__device__ __forceinline__ void letNextStart()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace trtllm_shadowkv::kernels
