// Instructions of compute capability 9.0a alone: matrix products of four warps from shared memory, barriers in shared
// memory, registers that warps hand to each other. One function each, as in ptx.cuh; kernels that call them are templates
// that do so under kHOPPER.
#pragma once

#include "kernels/ptx.cuh"

namespace trtllm_shadowkv::kernels
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHOPPER = true;
#else
inline constexpr bool kHOPPER = false;
#endif

// A warpgroup: warps 4 i to 4 i + 3 of a block.
inline constexpr int32_t kGROUP_THREADS = 128;

// --- barriers -----------------------------------------------------------------------------------------------------------

// A barrier of 8 bytes in shared memory whose phases end with `arrivals` arrivals each. Before others use it: a barrier of
// the block.
__device__ __forceinline__ void initBarrier(uint32_t barrier, int32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrives once all that this thread has started with copyAsync() is there.
__device__ __forceinline__ void arriveWithCopies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the barrier's phase of this parity; of a fresh barrier, parity 1 counts as ended.
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity)
{
    uint32_t ended = 0;
    while (ended == 0)
    {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(ended)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Named barrier `id`, 1 to 15, at which kCOUNT threads meet or, with arriveAt(), arrive only.
template <int32_t kCOUNT>
__device__ __forceinline__ void meetAt(int32_t id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kCOUNT) : "memory");
}

template <int32_t kCOUNT>
__device__ __forceinline__ void arriveAt(int32_t id)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kCOUNT) : "memory");
}

// What was written to shared memory, and this thread knows of, is seen by products that it starts.
__device__ __forceinline__ void fenceForProducts()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- registers ----------------------------------------------------------------------------------------------------------

// From here on the threads of this warpgroup have kCOUNT registers: fewer than at launch, or more, once others gave them.
template <int32_t kCOUNT>
__device__ __forceinline__ void shrinkRegisters()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCOUNT));
}

template <int32_t kCOUNT>
__device__ __forceinline__ void growRegisters()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCOUNT));
}

// --- products of a warpgroup --------------------------------------------------------------------------------------------

// Before the first product of a batch: registers that were written are seen by it.
__device__ __forceinline__ void beginProducts()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a batch of products.
__device__ __forceinline__ void commitProducts()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPENDING batches are under way: the newest ones.
template <int32_t kPENDING>
__device__ __forceinline__ void waitForProducts()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPENDING) : "memory");
}

// The compiler takes the sums for written here: after a wait, lest it reads them before.
template <int32_t N>
__device__ __forceinline__ void settle(float (&d)[N])
{
#pragma unroll
    for (int32_t i = 0; i < N; ++i)
    {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// A matrix in shared memory whose rows are k: element (row, k) of 2 bytes.
//   turnedMatrix  rows of 128 bytes one after the other, from a multiple of 1,024 bytes on; of row i, piece j of 16 bytes lies
//                 in the place of piece j ^ i % 8. For k from 16 s on: `address` plus 32 s bytes, s below 4.
//   unitMatrix    blocks of 8 rows of 16 bytes, which are 8 k; `rowStep` bytes to the next 8 rows, `kStep` to the next 8 k.
__device__ __forceinline__ uint64_t turnedMatrix(uint32_t address)
{
    return uint64_t{(address & 0x3ffffU) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ uint64_t unitMatrix(uint32_t address, uint32_t rowStep, uint32_t kStep)
{
    return uint64_t{(address & 0x3ffffU) >> 4} | uint64_t{kStep >> 4} << 16 | uint64_t{rowStep >> 4} << 32;
}

#define TSK_NAMES_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, "                                                                                                            \
    "%25, %26, %27, %28, %29, %30, %31"
#define TSK_NAMES_48 TSK_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TSK_NAMES_64 TSK_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TSK_SUMS_8(i)                                                                                                  \
    "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]),              \
        "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define TSK_SUMS_32 TSK_SUMS_8(0), TSK_SUMS_8(8), TSK_SUMS_8(16), TSK_SUMS_8(24)
#define TSK_SUMS_48 TSK_SUMS_32, TSK_SUMS_8(32), TSK_SUMS_8(40)
#define TSK_SUMS_64 TSK_SUMS_48, TSK_SUMS_8(48), TSK_SUMS_8(56)
// d = A B, or d += A B where %66 is not 0.
#define TSK_PRODUCT_SHARED(TYPE)                                                                                       \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "                                                             \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" TSK_NAMES_64                        \
                 "}, %64, %65, p, 1, 1, 0, 0; }"                                                                       \
        : TSK_SUMS_64                                                                                                  \
        : "l"(a), "l"(b), "n"(kADD ? 1 : 0)                                                                            \
        : "memory")
#define TSK_PRODUCT_REGISTERS(TYPE, N, NAMES, SUMS, A0, A1, A2, A3, B)                                                 \
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE   \
                 " {" NAMES "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 0; }"                           \
        : SUMS                                                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                           \
        : "memory")

// d (+)= A B of 64 rows of A and 128 rows of B over 16 k; as mma leaves it, a warp 16 rows: d[4 n + i] of lane (g, t) is
// what d[i] of mma is for columns 8 n to 8 n + 7. Both in shared memory.
template <typename T, bool kADD>
__device__ __forceinline__ void startProduct(float (&d)[64], uint64_t a, uint64_t b)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        TSK_PRODUCT_SHARED("f16");
    }
    else
    {
        TSK_PRODUCT_SHARED("bf16");
    }
}

// d += A B with N rows of B in shared memory, N = 64, 96 or 128, and A in registers, as mma wants it of a warp's 16 rows.
template <typename T, int32_t N>
__device__ __forceinline__ void startProduct(float (&d)[N / 2], uint32_t const (&a)[4], uint64_t b)
{
    static_assert(N == 64 || N == 96 || N == 128);
    if constexpr (std::is_same_v<T, __half>)
    {
        if constexpr (N == 64)
        {
            TSK_PRODUCT_REGISTERS("f16", "64", TSK_NAMES_32, TSK_SUMS_32, "32", "33", "34", "35", "36");
        }
        else if constexpr (N == 96)
        {
            TSK_PRODUCT_REGISTERS("f16", "96", TSK_NAMES_48, TSK_SUMS_48, "48", "49", "50", "51", "52");
        }
        else
        {
            TSK_PRODUCT_REGISTERS("f16", "128", TSK_NAMES_64, TSK_SUMS_64, "64", "65", "66", "67", "68");
        }
    }
    else
    {
        if constexpr (N == 64)
        {
            TSK_PRODUCT_REGISTERS("bf16", "64", TSK_NAMES_32, TSK_SUMS_32, "32", "33", "34", "35", "36");
        }
        else if constexpr (N == 96)
        {
            TSK_PRODUCT_REGISTERS("bf16", "96", TSK_NAMES_48, TSK_SUMS_48, "48", "49", "50", "51", "52");
        }
        else
        {
            TSK_PRODUCT_REGISTERS("bf16", "128", TSK_NAMES_64, TSK_SUMS_64, "64", "65", "66", "67", "68");
        }
    }
}

} // namespace trtllm_shadowkv::kernels
