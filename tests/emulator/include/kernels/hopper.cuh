// plugins/kernels/hopper.cuh for the emulated GPU: the same functions, in C++.
#pragma once

#include "kernels/ptx.cuh"

namespace emulator
{

// Bits of a matrix's name that hold a number of bytes, from this bit on.
inline uint64_t fieldOf(uint32_t bytes, uint32_t bit)
{
    if (bytes % 16 != 0 || bytes >= 1U << 18)
    {
        fail(cudaErrorIllegalAddress, "a matrix of products at, or with a step of, %08x bytes", bytes);
    }
    return uint64_t{bytes / 16} << bit;
}

} // namespace emulator

namespace trtllm_shadowkv::kernels
{

inline constexpr bool kHOPPER = true;

inline constexpr int32_t kGROUP_THREADS = 128;

// --- barriers -----------------------------------------------------------------------------------------------------------

inline void initBarrier(uint32_t barrier, int32_t arrivals, int line = __builtin_LINE())
{
    emulator::initBarrier(barrier, arrivals, line);
}

inline void arrive(uint32_t barrier, int line = __builtin_LINE())
{
    emulator::arrive(barrier, line);
}

inline void arriveWithCopies(uint32_t barrier, int line = __builtin_LINE())
{
    emulator::arriveWithCopies(barrier, line);
}

inline void await(uint32_t barrier, uint32_t parity, int line = __builtin_LINE())
{
    emulator::await(barrier, parity, line);
}

template <int32_t kCOUNT>
void meetAt(int32_t id, int line = __builtin_LINE())
{
    emulator::partBarrier(id, kCOUNT, true, line);
}

template <int32_t kCOUNT>
void arriveAt(int32_t id, int line = __builtin_LINE())
{
    emulator::partBarrier(id, kCOUNT, false, line);
}

inline void fenceForProducts()
{
    emulator::fenceForProducts();
}

// --- registers ----------------------------------------------------------------------------------------------------------

template <int32_t kCOUNT>
void shrinkRegisters(int line = __builtin_LINE())
{
    static_assert(kCOUNT % 8 == 0 && kCOUNT >= 24 && kCOUNT <= 256);
    emulator::meetOnly("shrinkRegisters", line);
}

template <int32_t kCOUNT>
void growRegisters(int line = __builtin_LINE())
{
    static_assert(kCOUNT % 8 == 0 && kCOUNT >= 24 && kCOUNT <= 256);
    emulator::meetOnly("growRegisters", line);
}

// --- products of a warpgroup --------------------------------------------------------------------------------------------

inline void beginProducts(int line = __builtin_LINE())
{
    emulator::beginProducts(line);
}

inline void commitProducts(int line = __builtin_LINE())
{
    emulator::commitProducts(line);
}

template <int32_t kPENDING>
void waitForProducts(int line = __builtin_LINE())
{
    static_assert(kPENDING >= 0 && kPENDING < 8);
    emulator::waitForProducts(kPENDING, line);
}

template <int32_t N>
void settle(float (&)[N])
{
}

inline uint64_t turnedMatrix(uint32_t address)
{
    if (address % 1024 > 96 || address % 32 != 0)
    {
        emulator::fail(
            cudaErrorMisalignedAddress, "turnedMatrix(%08x): not 32 s bytes after a multiple of 1,024", address);
    }
    return emulator::fieldOf(address, 0) | emulator::fieldOf(16, 16) | emulator::fieldOf(1024, 32) | uint64_t{1} << 62;
}

inline uint64_t unitMatrix(uint32_t address, uint32_t rowStep, uint32_t kStep)
{
    return emulator::fieldOf(address, 0) | emulator::fieldOf(kStep, 16) | emulator::fieldOf(rowStep, 32);
}

template <typename T, bool kADD>
void startProduct(float (&d)[64], uint64_t a, uint64_t b, int line = __builtin_LINE())
{
    emulator::startProduct(d, {nullptr, a, b, {}, 128, false, std::is_same_v<T, __half>, kADD}, line);
}

template <typename T, int32_t N>
void startProduct(float (&d)[N / 2], uint32_t const (&a)[4], uint64_t b, int line = __builtin_LINE())
{
    static_assert(N == 64 || N == 96 || N == 128);
    emulator::startProduct(
        d, {nullptr, 0, b, {a[0], a[1], a[2], a[3]}, N, true, std::is_same_v<T, __half>, true}, line);
}

} // namespace trtllm_shadowkv::kernels
