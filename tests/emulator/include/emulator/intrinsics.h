// Built-in variables and functions of device code.
#pragma once

#include "emulator/core.h"

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

// --- barriers -------------------------------------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE())
{
    ::emulator::blockBarrier(::emulator::Vote::kNONE, 0, line);
}

inline int __syncthreads_count(int predicate, int line = __builtin_LINE())
{
    return ::emulator::blockBarrier(::emulator::Vote::kCOUNT, predicate, line);
}

inline int __syncthreads_and(int predicate, int line = __builtin_LINE())
{
    return ::emulator::blockBarrier(::emulator::Vote::kAND, predicate, line);
}

inline int __syncthreads_or(int predicate, int line = __builtin_LINE())
{
    return ::emulator::blockBarrier(::emulator::Vote::kOR, predicate, line);
}

inline void __syncwarp(uint32_t mask = 0xffffffffU, int line = __builtin_LINE())
{
    ::emulator::collective(::emulator::combineNothing, mask, "__syncwarp", line, nullptr, 0, nullptr, 0);
}

inline void __threadfence()
{
}
inline void __threadfence_block()
{
}
inline void __threadfence_system()
{
}
inline void __nanosleep(unsigned)
{
}

[[noreturn]] inline void __trap()
{
    ::emulator::fail(cudaErrorLaunchFailure, "__trap()");
}

// --- warp collectives -----------------------------------------------------------------------------------------------------

template <typename T>
T __shfl_sync(uint32_t mask, T value, int32_t lane, int32_t width = 32, int line = __builtin_LINE())
{
    return ::emulator::shuffle<::emulator::Way::kINDEX>(mask, value, lane, width, "__shfl_sync", line);
}

template <typename T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t delta, int32_t width = 32, int line = __builtin_LINE())
{
    return ::emulator::shuffle<::emulator::Way::kUP>(
        mask, value, static_cast<int32_t>(delta), width, "__shfl_up_sync", line);
}

template <typename T>
T __shfl_down_sync(uint32_t mask, T value, uint32_t delta, int32_t width = 32, int line = __builtin_LINE())
{
    return ::emulator::shuffle<::emulator::Way::kDOWN>(
        mask, value, static_cast<int32_t>(delta), width, "__shfl_down_sync", line);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int32_t lanes, int32_t width = 32, int line = __builtin_LINE())
{
    return ::emulator::shuffle<::emulator::Way::kXOR>(mask, value, lanes, width, "__shfl_xor_sync", line);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, int line = __builtin_LINE())
{
    return ::emulator::ballot(mask, predicate != 0, "__ballot_sync", line);
}

inline int __any_sync(uint32_t mask, int predicate, int line = __builtin_LINE())
{
    return ::emulator::ballot(mask, predicate != 0, "__any_sync", line) != 0 ? 1 : 0;
}

inline int __all_sync(uint32_t mask, int predicate, int line = __builtin_LINE())
{
    return ::emulator::ballot(mask, predicate != 0, "__all_sync", line) == 0xffffffffU ? 1 : 0;
}

template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value, int line = __builtin_LINE())
{
    uint32_t out = 0;
    ::emulator::collective(::emulator::combineMatch<T>, mask, "__match_any_sync", line, &value, sizeof(value), &out, 4);
    return out;
}

#define EMULATOR_REDUCE(NAME, OPERATION)                                                                               \
    template <typename T>                                                                                              \
    T NAME(uint32_t mask, T value, int line = __builtin_LINE())                                                        \
    {                                                                                                                  \
        return ::emulator::reduce<::emulator::OPERATION>(mask, value, #NAME, line);                                    \
    }
EMULATOR_REDUCE(__reduce_add_sync, Add)
EMULATOR_REDUCE(__reduce_min_sync, Min)
EMULATOR_REDUCE(__reduce_max_sync, Max)
EMULATOR_REDUCE(__reduce_and_sync, And)
EMULATOR_REDUCE(__reduce_or_sync, Or)
EMULATOR_REDUCE(__reduce_xor_sync, Xor)
#undef EMULATOR_REDUCE

inline uint32_t __activemask()
{
    return 0xffffffffU;
}

// --- atomics --------------------------------------------------------------------------------------------------------------

template <typename T>
T atomicAdd(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return static_cast<T>(x + v); });
}
template <typename T>
T atomicSub(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return static_cast<T>(x - v); });
}
template <typename T>
T atomicMax(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return x < v ? v : x; });
}
template <typename T>
T atomicMin(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return v < x ? v : x; });
}
template <typename T>
T atomicAnd(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return x & v; });
}
template <typename T>
T atomicOr(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return x | v; });
}
template <typename T>
T atomicXor(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return x ^ v; });
}
template <typename T>
T atomicExch(T* p, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T) { return v; });
}
template <typename T>
T atomicCAS(T* p, ::emulator::Same<T> expected, ::emulator::Same<T> v)
{
    return ::emulator::exchange(p, [&](T x) { return x == expected ? v : x; });
}

// --- loads and stores -----------------------------------------------------------------------------------------------------

#define EMULATOR_LOAD(NAME)                                                                                            \
    template <typename T>                                                                                              \
    T NAME(T const* p)                                                                                                 \
    {                                                                                                                  \
        return *p;                                                                                                     \
    }
#define EMULATOR_STORE(NAME)                                                                                           \
    template <typename T>                                                                                              \
    void NAME(T* p, ::emulator::Same<T> v)                                                                             \
    {                                                                                                                  \
        *p = v;                                                                                                        \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldlu)
EMULATOR_LOAD(__ldcv)
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_LOAD
#undef EMULATOR_STORE

inline size_t __cvta_generic_to_shared(void const* p)
{
    return ::emulator::sharedAddress(p);
}

// --- bits -----------------------------------------------------------------------------------------------------------------

inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}
inline int __popcll(unsigned long long v)
{
    return __builtin_popcountll(v);
}
inline int __clz(int v)
{
    return v == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(v));
}
inline int __clzll(long long v)
{
    return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v));
}
inline int __ffs(int v)
{
    return __builtin_ffs(v);
}
inline int __ffsll(long long v)
{
    return __builtin_ffsll(v);
}
inline uint32_t __brev(uint32_t v)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; ++i)
    {
        r |= (v >> i & 1U) << (31 - i);
    }
    return r;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t const bytes = uint64_t{b} << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i)
    {
        uint32_t const s = selector >> 4 * i & 0xfU;
        uint32_t const byte = static_cast<uint32_t>(bytes >> 8 * (s & 7U)) & 0xffU;
        r |= ((s & 8U) != 0 ? (byte & 0x80U ? 0xffU : 0U) : byte) << 8 * i;
    }
    return r;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift)
{
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (shift & 31U) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift)
{
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31U));
}
inline float __uint_as_float(uint32_t v)
{
    return ::emulator::bitCast<float>(v);
}
inline float __int_as_float(int32_t v)
{
    return ::emulator::bitCast<float>(v);
}
inline uint32_t __float_as_uint(float v)
{
    return ::emulator::bitCast<uint32_t>(v);
}
inline int32_t __float_as_int(float v)
{
    return ::emulator::bitCast<int32_t>(v);
}
inline double __longlong_as_double(long long v)
{
    return ::emulator::bitCast<double>(v);
}
inline long long __double_as_longlong(double v)
{
    return ::emulator::bitCast<long long>(v);
}

// --- arithmetic -----------------------------------------------------------------------------------------------------------

// Macros: the C library has functions of these names that it does not export.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define __frcp_rn(x) (1.0F / (x))
#define __fsqrt_rn(x) sqrtf(x)
#define __fdividef(x, y) ((x) / (y))
#define __fdiv_rn(x, y) ((x) / (y))
#define __fadd_rn(x, y) ((x) + (y))
#define __fsub_rn(x, y) ((x) - (y))
#define __fmul_rn(x, y) ((x) * (y))
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define __fma_rn(x, y, z) fma(x, y, z)
#define __dsqrt_rn(x) sqrt(x)
#define __drcp_rn(x) (1.0 / (x))

inline float rsqrtf(float x)
{
    return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
inline float __frsqrt_rn(float x)
{
    return rsqrtf(x);
}
inline float __saturatef(float x)
{
    return x > 0.0F ? (x < 1.0F ? x : 1.0F) : 0.0F;
}

// A GPU's conversions to integers: NaN gives 0, what is out of range the nearest.
inline int32_t __float2int_rn(float x)
{
    return isnan(x)              ? 0
           : x >= 2147483648.0F  ? INT32_MAX
           : x <= -2147483648.0F ? INT32_MIN
                                 : static_cast<int32_t>(nearbyintf(x));
}
inline int32_t __float2int_rz(float x)
{
    return __float2int_rn(truncf(x));
}
inline int32_t __float2int_rd(float x)
{
    return __float2int_rn(floorf(x));
}
inline int32_t __float2int_ru(float x)
{
    return __float2int_rn(ceilf(x));
}
inline uint32_t __float2uint_rz(float x)
{
    return isnan(x) || x <= 0.0F ? 0U : x >= 4294967296.0F ? UINT32_MAX : static_cast<uint32_t>(x);
}
inline uint32_t __float2uint_rn(float x)
{
    return __float2uint_rz(nearbyintf(x));
}
inline float __int2float_rn(int32_t x)
{
    return static_cast<float>(x);
}
inline float __uint2float_rn(uint32_t x)
{
    return static_cast<float>(x);
}

#define EMULATOR_MINMAX(A, B, R)                                                                                       \
    inline R min(A a, B b)                                                                                             \
    {                                                                                                                  \
        return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b);                          \
    }                                                                                                                  \
    inline R max(A a, B b)                                                                                             \
    {                                                                                                                  \
        return static_cast<R>(a) > static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b);                          \
    }
EMULATOR_MINMAX(int, int, int)
EMULATOR_MINMAX(unsigned, unsigned, unsigned)
EMULATOR_MINMAX(int, unsigned, unsigned)
EMULATOR_MINMAX(unsigned, int, unsigned)
EMULATOR_MINMAX(long, long, long)
EMULATOR_MINMAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MINMAX(long, unsigned long, unsigned long)
EMULATOR_MINMAX(unsigned long, long, unsigned long)
EMULATOR_MINMAX(long long, long long, long long)
EMULATOR_MINMAX(unsigned long long, unsigned long long, unsigned long long)
EMULATOR_MINMAX(long long, unsigned long long, unsigned long long)
EMULATOR_MINMAX(unsigned long long, long long, unsigned long long)
#undef EMULATOR_MINMAX
inline float min(float a, float b)
{
    return fminf(a, b);
}
inline float max(float a, float b)
{
    return fmaxf(a, b);
}
inline double min(double a, double b)
{
    return fmin(a, b);
}
inline double max(double a, double b)
{
    return fmax(a, b);
}
inline double min(float a, double b)
{
    return fmin(a, b);
}
inline double min(double a, float b)
{
    return fmin(a, b);
}
inline double max(float a, double b)
{
    return fmax(a, b);
}
inline double max(double a, float b)
{
    return fmax(a, b);
}
