// The emulator as headers see it, and what collectives compute.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <tuple>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __global__
#undef __constant__
#undef __noinline__
#define __shared__ static thread_local // one block at a time; thread-local memory is one piece, see sharedAddress()
#define __launch_bounds__(...)
#define __grid_constant__
#define __global__
#define __constant__ static
#define __noinline__

namespace emulator
{

// Ends the launch with an error; does not return.
[[noreturn]] void fail(cudaError_t error, char const* format, ...) __attribute__((format(printf, 2, 3)));

// --- barriers and collectives ---------------------------------------------------------------------------------------------

inline constexpr uint32_t kLANES = 32;
inline constexpr uint32_t kLANE_BYTES = 64;

using Lanes = unsigned char[kLANES][kLANE_BYTES];

// What a collective makes of the inputs of all lanes.
using Combine = void (*)(Lanes const& in, Lanes& out);

struct LaneMemory
{
    void* in;
    void const* out;
};

LaneMemory laneMemory(); // of the running thread

// Waits for the 32 lanes of the warp at the same collective: `combine` and `line` must agree.
void meet(Combine combine, uint32_t mask, char const* name, int line);

inline void collective(Combine combine, uint32_t mask, char const* name, int line, void const* in, size_t inBytes,
    void* out, size_t outBytes) __attribute__((always_inline));

inline void collective(Combine combine, uint32_t mask, char const* name, int line, void const* in, size_t inBytes,
    void* out, size_t outBytes)
{
    LaneMemory const memory = laneMemory();
    if (inBytes != 0)
    {
        std::memcpy(memory.in, in, inBytes);
    }
    meet(combine, mask, name, line);
    if (outBytes != 0)
    {
        std::memcpy(out, memory.out, outBytes);
    }
}

enum class Vote
{
    kNONE,
    kCOUNT,
    kAND,
    kOR
};

// Waits for all threads of the block.
int blockBarrier(Vote vote, int predicate, int line);

// --- shared memory --------------------------------------------------------------------------------------------------------

void* dynamicMemory();
uint32_t sharedAddress(void const* pointer);
void* sharedPointer(uint32_t address, uint32_t bytes, uint32_t alignment);

// Happens no sooner than waitForCopies() (or, TSK_EMULATED_COPIES=early, at once): both are allowed on a GPU.
// Of `bytes` bytes the first `count` are copied, the others zero.
void copyAsync(uint32_t to, void const* from, uint32_t bytes, int32_t count);
void commitCopies();
void waitForCopies(uint32_t pending);

// --- barriers of a part of the block (barriers.cpp) -----------------------------------------------------------------------

void initBarrier(uint32_t barrier, int32_t arrivals, int line);
void arrive(uint32_t barrier, int line);

// The arrival happens when nobody can go on without it (or, TSK_EMULATED_COPIES=early, at once), with the copies before it.
void arriveWithCopies(uint32_t barrier, int line);
void await(uint32_t barrier, uint32_t parity, int line);

// `count` threads at named barrier `id`; who does not wait goes on.
void partBarrier(int32_t id, uint32_t count, bool waits, int line);

// --- products of four warps (products.cpp) --------------------------------------------------------------------------------

// What a lane gives to a product. Matrices in shared memory are named as hopper.cuh does.
struct Factors
{
    float* sums; // where the lane's are added to
    uint64_t a;
    uint64_t b;
    uint32_t registers[4]; // A, where hasRegisters
    uint32_t rows;         // of B
    bool hasRegisters;
    bool isHalf; // float16, else bfloat16
    bool adds;
};

void combineProduct(Lanes const& in, Lanes& out);

void fenceForProducts();
void beginProducts(int line);

// Reads its matrices at once. In `sums` is no number until waitForProducts(), which waits until nobody else can go on (or,
// TSK_EMULATED_COPIES=early, the result at once); until then neither they nor the matrices may be written.
void startProduct(float* sums, Factors factors, int line);
void commitProducts(int line);
void waitForProducts(uint32_t pending, int line);
void meetOnly(char const* name, int line); // the lanes of the warp

// --- launch ---------------------------------------------------------------------------------------------------------------

struct Launch
{
    void const* kernel;
    dim3 grid;
    dim3 block;
    size_t sharedBytes;
    void (*invoke)(void const* arguments);
    void const* arguments;
};

cudaError_t run(Launch const& launch);

template <typename T>
T valueOf(Lanes const& lanes, uint32_t lane)
{
    T value;
    std::memcpy(&value, lanes[lane], sizeof(T));
    return value;
}

template <typename T>
void setValue(Lanes& lanes, uint32_t lane, T const& value)
{
    std::memcpy(lanes[lane], &value, sizeof(T));
}

// --- shuffles, votes, reductions --------------------------------------------------------------------------------------------

template <typename T>
struct Shuffle
{
    T value;
    int32_t operand;
    int32_t width;
};

enum class Way
{
    kINDEX,
    kUP,
    kDOWN,
    kXOR
};

template <typename T, Way kWAY>
void combineShuffle(Lanes const& in, Lanes& out)
{
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        auto const own = valueOf<Shuffle<T>>(in, i);
        int32_t const lane = static_cast<int32_t>(i);
        int32_t const first = lane / own.width * own.width;
        int32_t const end = first + own.width;
        int32_t from = lane;
        switch (kWAY)
        {
        case Way::kINDEX:
            from = first + (own.operand & (own.width - 1));
            break;
        case Way::kUP:
            from = lane - own.operand >= first ? lane - own.operand : lane;
            break;
        case Way::kDOWN:
            from = lane + own.operand < end ? lane + own.operand : lane;
            break;
        case Way::kXOR:
            from = (lane ^ own.operand) < end ? lane ^ own.operand : lane;
            break;
        }
        setValue(out, i, valueOf<Shuffle<T>>(in, static_cast<uint32_t>(from)).value);
    }
}

template <Way kWAY, typename T>
T shuffle(uint32_t mask, T value, int32_t operand, int32_t width, char const* name, int line)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(Shuffle<T>) <= kLANE_BYTES);
    Shuffle<T> const in{value, operand, width};
    T out;
    collective(combineShuffle<T, kWAY>, mask, name, line, &in, sizeof(in), &out, sizeof(out));
    return out;
}

inline void combineBallot(Lanes const& in, Lanes& out)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        bits |= valueOf<uint32_t>(in, i) << i;
    }
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        setValue(out, i, bits);
    }
}

inline uint32_t ballot(uint32_t mask, bool predicate, char const* name, int line)
{
    uint32_t const in = predicate ? 1U : 0U;
    uint32_t out = 0;
    collective(combineBallot, mask, name, line, &in, sizeof(in), &out, sizeof(out));
    return out;
}

template <typename T, typename F>
void combineReduce(Lanes const& in, Lanes& out)
{
    T sum = valueOf<T>(in, 0);
    for (uint32_t i = 1; i < kLANES; ++i)
    {
        sum = F{}(sum, valueOf<T>(in, i));
    }
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        setValue(out, i, sum);
    }
}

template <typename F, typename T>
T reduce(uint32_t mask, T value, char const* name, int line)
{
    static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, int32_t>, "__reduce_*_sync takes 32-bit integers");
    T out;
    collective(combineReduce<T, F>, mask, name, line, &value, sizeof(value), &out, sizeof(out));
    return out;
}

struct Add
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
    }
};
struct Min
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return b < a ? b : a;
    }
};
struct Max
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return a < b ? b : a;
    }
};
struct And
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return a & b;
    }
};
struct Or
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return a | b;
    }
};
struct Xor
{
    template <typename T>
    T operator()(T a, T b) const
    {
        return a ^ b;
    }
};

template <typename T>
void combineMatch(Lanes const& in, Lanes& out)
{
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        uint32_t bits = 0;
        for (uint32_t j = 0; j < kLANES; ++j)
        {
            bits |= (std::memcmp(in[i], in[j], sizeof(T)) == 0 ? 1U : 0U) << j;
        }
        setValue(out, i, bits);
    }
}

inline void combineNothing(Lanes const&, Lanes&)
{
}

template <typename To, typename From>
To bitCast(From from)
{
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <typename T>
using Same = typename std::common_type<T>::type; // not deduced

template <typename T, typename F>
T exchange(T* address, F const& f)
{
    T const before = *address;
    *address = f(before);
    return before;
}

} // namespace emulator
