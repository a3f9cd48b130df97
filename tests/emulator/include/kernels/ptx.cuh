// plugins/kernels/ptx.cuh for the emulated GPU: the same functions, in C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "emulator.h"

namespace emulator
{

struct MmaOperands
{
    uint32_t a[4];
    uint32_t b[2];
    float d[4];
};

void combineMmaF16(Lanes const& in, Lanes& out);
void combineMmaBF16(Lanes const& in, Lanes& out);
void combineTranspose(Lanes const& in, Lanes& out);
void combineLoadMatrices(Lanes const& in, Lanes& out);
void combineLoadTransposed(Lanes const& in, Lanes& out);

template <typename T>
T loadAligned(void const* address)
{
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0)
    {
        fail(cudaErrorMisalignedAddress, "load of %zu bytes at %p", sizeof(T), address);
    }
    T v;
    std::memcpy(&v, address, sizeof(T));
    return v;
}

} // namespace emulator

namespace trtllm_shadowkv::kernels
{

inline constexpr uint32_t kFULL_WARP = 0xffffffffU;

// --- loads and stores ---------------------------------------------------------------------------------------------------

inline uint4 loadStream(void const* address)
{
    return emulator::loadAligned<uint4>(address);
}

inline uint2 loadStream2(void const* address)
{
    return emulator::loadAligned<uint2>(address);
}

inline uint4 loadOnce(uint64_t address)
{
    return emulator::loadAligned<uint4>(reinterpret_cast<void const*>(address));
}

inline void store(uint64_t address, uint4 v)
{
    if (address % sizeof(v) != 0)
    {
        emulator::fail(cudaErrorMisalignedAddress, "store of 16 bytes at %p", reinterpret_cast<void*>(address));
    }
    std::memcpy(reinterpret_cast<void*>(address), &v, sizeof(v));
}

inline uint4 loadShared(uint4 const& piece)
{
    return emulator::loadAligned<uint4>(emulator::sharedPointer(emulator::sharedAddress(&piece), 16, 16));
}

inline void prefetchL2(void const*)
{
}

inline char const* opaque(char const* address)
{
    return address;
}

template <typename T>
T* dynamicShared()
{
    return static_cast<T*>(emulator::dynamicMemory());
}

// --- copies from global to shared memory ----------------------------------------------------------------------------------

inline uint32_t sharedAddress(void const* p)
{
    return emulator::sharedAddress(p);
}

inline uint64_t evictFirst()
{
    return 0;
}

template <int32_t kBYTES>
void copyAsync(uint32_t to, void const* from)
{
    static_assert(kBYTES == 4 || kBYTES == 8 || kBYTES == 16);
    emulator::copyAsync(to, from, kBYTES, kBYTES);
}

template <int32_t kBYTES>
void copyAsync(uint32_t to, void const* from, uint64_t)
{
    copyAsync<kBYTES>(to, from);
}

inline void copyAsyncPart(uint32_t to, void const* from, int32_t bytes)
{
    emulator::copyAsync(to, from, 16, bytes);
}

inline void commitCopies()
{
    emulator::commitCopies();
}

template <uint32_t kPENDING>
void waitForCopies()
{
    emulator::waitForCopies(kPENDING);
}

// --- arithmetic ---------------------------------------------------------------------------------------------------------

template <typename T>
uint32_t pack(float low, float high)
{
    if constexpr (std::is_same_v<T, __half>)
    {
        auto const bits
            = [](float x) { return std::isnan(x) ? 0x7fffU : uint32_t{static_cast<__half_raw>(__float2half_rn(x)).x}; };
        return bits(low) | bits(high) << 16;
    }
    else
    {
        auto const bits = [](float x)
        {
            uint32_t const u = __float_as_uint(x);
            return std::isnan(x) ? 0x7fffU : (u + 0x7fffU + (u >> 16 & 1U)) >> 16;
        };
        return bits(low) | bits(high) << 16;
    }
}

inline float powerOfTwo(float x)
{
    float const r = exp2f(x);
    return r < 0x1p-126F ? 0.0F : r; // NaN stays
}

// --- tensor cores -------------------------------------------------------------------------------------------------------

template <typename T>
void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
    int line = __builtin_LINE())
{
    emulator::MmaOperands const in{{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    emulator::collective(std::is_same_v<T, __half> ? emulator::combineMmaF16 : emulator::combineMmaBF16, kFULL_WARP,
        "mma", line, &in, sizeof(in), d, sizeof(d));
}

inline uint32_t transpose8x8(uint32_t v, int line = __builtin_LINE())
{
    uint32_t r = 0;
    emulator::collective(emulator::combineTranspose, kFULL_WARP, "transpose8x8", line, &v, 4, &r, 4);
    return r;
}

inline void loadMatrices(uint32_t (&r)[4], uint32_t row, int line = __builtin_LINE())
{
    void* const p = emulator::sharedPointer(row, 16, 16);
    emulator::collective(emulator::combineLoadMatrices, kFULL_WARP, "loadMatrices", line, &p, sizeof(p), r, sizeof(r));
}

inline void loadTransposed(uint32_t (&r)[4], uint32_t row, int line = __builtin_LINE())
{
    void* const p = emulator::sharedPointer(row, 16, 16);
    emulator::collective(
        emulator::combineLoadTransposed, kFULL_WARP, "loadTransposed", line, &p, sizeof(p), r, sizeof(r));
}

// --- order of kernels ---------------------------------------------------------------------------------------------------

inline void afterPrevious()
{
}

inline void letNextStart()
{
}

} // namespace trtllm_shadowkv::kernels
