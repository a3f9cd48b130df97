// Causal attention of a stretch on compute capability 9.0a. Three warpgroups: one copies tiles of keys and values into
// shared memory, two have 64 query rows each and multiply straight from there.
//
// While a tile's weights are computed, the products of the tile before it with its values run, and those of the other
// warpgroup: they take turns at starting products, so that one's weights are computed beside the other's products.
//
// A tile is a live page. Queries and keys lie as turnedMatrix() wants them, in halves of 64 columns; values are units
// [D][8 tokens] as they come, which is unitMatrix().
#include "kernels/context/attend_stretch_hopper.h"

#include "kernels/context/attend_stretch_part.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/hopper.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kCONSUMERS = 2; // warpgroups
constexpr int32_t kTHREADS = (1 + kCONSUMERS) * kGROUP_THREADS;
constexpr int32_t kGROUP_ROWS = kROWS / kCONSUMERS;
constexpr int32_t kKEYS = kLIVE_PAGE_TOKENS; // of a tile
constexpr int32_t kSTAGES = 2;
constexpr int32_t kCOPYING_REGISTERS = 24;
constexpr int32_t kMULTIPLYING_REGISTERS = 240;
static_assert(kGROUP_ROWS == 64 && kKEYS == 128, "the shape of startProduct()");

// What only templates name that code for other devices does without is [[maybe_unused]].

// Named barriers.
[[maybe_unused]] constexpr int32_t kTURN = 1;      // and 2: a warpgroup's turn to start products
[[maybe_unused]] constexpr int32_t kROWS_MEET = 3; // and 4: a warpgroup's threads

// In bytes of shared memory, from a multiple of 1,024 on.
template <int32_t D>
struct HopperShared
{
    static constexpr int32_t kHALVES = (D + 63) / 64; // of 128 bytes, the last one may be filled in part
    static constexpr int32_t kHALF = 128 * 128;       // 128 rows
    static constexpr int32_t kKEYS_AT = kHALVES * kHALF;
    static constexpr int32_t kKEY_BYTES = kHALVES * kHALF; // a stage
    static constexpr int32_t kVALUES_AT = kKEYS_AT + kSTAGES * kKEY_BYTES;
    static constexpr int32_t kVALUE_BYTES = kKEYS * D * 2;
    static constexpr int32_t kBARRIERS_AT = kVALUES_AT + kSTAGES * kVALUE_BYTES;
    static constexpr int32_t kBYTES = kBARRIERS_AT + kSTAGES * 4 * 8 + 1024; // the begin is rounded up
};

// Bytes from row 0 to a piece of 16 bytes of a row of queries or keys.
[[maybe_unused]] __device__ __forceinline__ int32_t turnedAt(int32_t row, int32_t piece)
{
    return piece / 8 * HopperShared<64>::kHALF + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// Of each stage: keys are there, values are there, keys were read, values were read.
struct Barriers
{
    uint32_t first;

    __device__ __forceinline__ uint32_t keysThere(int32_t stage) const
    {
        return first + stage * 32;
    }
    __device__ __forceinline__ uint32_t valuesThere(int32_t stage) const
    {
        return first + stage * 32 + 8;
    }
    __device__ __forceinline__ uint32_t keysRead(int32_t stage) const
    {
        return first + stage * 32 + 16;
    }
    __device__ __forceinline__ uint32_t valuesRead(int32_t stage) const
    {
        return first + stage * 32 + 24;
    }

    __device__ __forceinline__ void init() const
    {
        for (int32_t stage = 0; stage < kSTAGES; ++stage)
        {
            initBarrier(keysThere(stage), kGROUP_THREADS);
            initBarrier(valuesThere(stage), kGROUP_THREADS);
            initBarrier(keysRead(stage), kCONSUMERS * kGROUP_THREADS / 32);
            initBarrier(valuesRead(stage), kCONSUMERS * kGROUP_THREADS / 32);
        }
    }
};

// The phase of a stage's barriers that tile `tile` is in: of those that say that it is there.
[[maybe_unused]] __device__ __forceinline__ uint32_t phaseOf(int32_t tile)
{
    return static_cast<uint32_t>(tile / kSTAGES % 2);
}

// The copying warpgroup. As many threads copy as there are pieces in some whole turns of 8 rows, so that a thread's next
// piece is a fixed number of bytes on, there and here.
template <typename T, int32_t D>
__device__ __forceinline__ void copyTiles(View const& view, int32_t layer, Stretch const& stretch, Part const& part,
    int32_t tiles, uint32_t shared, Barriers const& barriers)
{
    using Shared = HopperShared<D>;
    constexpr int32_t kPIECES = D / 8; // of a row of keys; a unit of values has D
    constexpr int32_t kCOPIERS = kGROUP_THREADS / (8 * kPIECES) * (8 * kPIECES);
    constexpr int32_t kCOUNT = kKEYS * kPIECES / kCOPIERS;
    constexpr int32_t kSTEP = kCOPIERS * 16; // bytes
    constexpr int32_t kROW_STEP = kCOPIERS / kPIECES;
    static_assert(kCOPIERS % D == 0 || D % kCOPIERS == 0, "a thread's pieces of values are of whole units");
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    bool const copies = thread < kCOPIERS;
    uint32_t const valueBytes = static_cast<uint32_t>(view.kvHeads * kLIVE_PAGE_TOKENS * D * 2); // from keys to values
    size_t const pageBytes = size_t{valueBytes} * 2;
    unsigned char const* const keys
        = reinterpret_cast<unsigned char const*>(liveKey<T>(view, layer, 0, part.head, 0)) + thread * 16;
    uint32_t const toKeys
        = shared + static_cast<uint32_t>(Shared::kKEYS_AT + turnedAt(thread / kPIECES, thread % kPIECES));
    uint32_t const toValues = shared + static_cast<uint32_t>(Shared::kVALUES_AT + thread * 16);
    int32_t const* const pages = view.liveTable + size_t{static_cast<uint32_t>(stretch.slot)} * view.liveTableStride;
    int32_t page = pages[0];
    for (int32_t tile = 0; tile < tiles; ++tile)
    {
        int32_t const stage = tile % kSTAGES;
        unsigned char const* const from = keys + static_cast<uint32_t>(page) * pageBytes;
        page = pages[min(tile + 1, tiles - 1)]; // ahead of its tile

        await(barriers.keysRead(stage), phaseOf(tile) ^ 1);
        if (copies)
        {
#pragma unroll
            for (int32_t j = 0; j < kCOUNT; ++j)
            {
                copyAsync<16>(toKeys + stage * Shared::kKEY_BYTES + j * kROW_STEP * 128, from + j * kSTEP);
            }
        }
        arriveWithCopies(barriers.keysThere(stage));

        await(barriers.valuesRead(stage), phaseOf(tile) ^ 1);
        uint32_t const to = toValues + static_cast<uint32_t>(stage * Shared::kVALUE_BYTES);
        int32_t const left = part.end - tile * kKEYS; // tokens
        if (copies && left >= kKEYS)
        {
#pragma unroll
            for (int32_t j = 0; j < kCOUNT; ++j)
            {
                copyAsync<16>(to + j * kSTEP, from + valueBytes + j * kSTEP);
            }
        }
        else if (copies)
        {
            // Values of tokens past the last one are zero: nothing may have been written there, and 0 times NaN is NaN.
            // Keys need not be: their scores are masked.
#pragma unroll 1
            for (int32_t j = 0; j < kCOUNT; ++j)
            {
                int32_t const there = left - (thread + j * kCOPIERS) / D * kUNIT;
                copyAsyncPart(to + j * kSTEP, from + valueBytes + j * kSTEP, min(max(there, 0), kUNIT) * 2);
            }
        }
        arriveWithCopies(barriers.valuesThere(stage));
    }
}

// A thread's two rows, g and g + 8 of its warp's 16, as startProduct() leaves them.
template <int32_t D>
struct RowSums
{
    float o[D / 2];
    float m[2];
    float l[2]; // the lane's part
};

using Scores = float[kKEYS / 2];

// The warpgroup's rows of queries into shared memory; rows past the part's are zero.
template <typename T, int32_t D>
__device__ __forceinline__ void loadQueries(
    View const& view, Part const& part, T const* q, int32_t group, int32_t thread, uint32_t shared)
{
    constexpr int32_t kPIECES = D / 8;
#pragma unroll 4
    for (int32_t i = thread; i < kGROUP_ROWS * kPIECES; i += kGROUP_THREADS)
    {
        int32_t const row = group * kGROUP_ROWS + i / kPIECES;
        int32_t const piece = i % kPIECES;
        T const* const from = q + rowAt<D>(view, part, min(row, part.rows - 1)) + piece * 8;
        copyAsyncPart(shared + static_cast<uint32_t>(turnedAt(row, piece)), from, row < part.rows ? 16 : 0);
    }
    commitCopies();
    waitForCopies<0>();
    fenceForProducts();
    meetAt<kGROUP_THREADS>(kROWS_MEET + group);
}

// Starts s = Q K^T.
template <typename T, int32_t D>
__device__ __forceinline__ void startScores(Scores& s, uint32_t queries, uint32_t keys)
{
    constexpr int32_t kHALF = HopperShared<D>::kHALF;
    beginProducts();
#pragma unroll
    for (int32_t k = 0; k < D / 16; ++k)
    {
        uint32_t const at = static_cast<uint32_t>(k / 4 * kHALF + k % 4 * 32);
        if (k == 0)
        {
            startProduct<T, false>(s, turnedMatrix(queries + at), turnedMatrix(keys + at));
        }
        else
        {
            startProduct<T, true>(s, turnedMatrix(queries + at), turnedMatrix(keys + at));
        }
    }
    commitProducts();
}

// Starts O += P V.
template <typename T, int32_t D>
__device__ __forceinline__ void startValues(RowSums<D>& sums, uint32_t const (&p)[kKEYS / 16][4], uint32_t values)
{
    constexpr uint32_t kUNIT_BYTES = D * 16;
    beginProducts();
#pragma unroll
    for (int32_t k = 0; k < kKEYS / 16; ++k)
    {
        uint64_t const v = unitMatrix(values + static_cast<uint32_t>(k) * 2 * kUNIT_BYTES, 128, kUNIT_BYTES);
        startProduct<T, D>(sums.o, p[k], v);
    }
    commitProducts();
}

// Scores of keys past a row's own position become -inf. `last`: the last key of the tile that a row attends to, minus the
// lane's first.
[[maybe_unused]] __device__ __forceinline__ void maskScores(Scores& s, int32_t const (&last)[2])
{
#pragma unroll
    for (int32_t i = 0; i < kKEYS / 2; ++i)
    {
        s[i] = i / 4 * 8 + i % 2 <= last[i / 2 % 2] ? s[i] : -INFINITY;
    }
}

// Turns scores into weights, in place; maxima and sums of weights move on, and `factor` says by what O has to be
// multiplied. `scale`: of scores, log2(e) included. A row whose maximum stays is multiplied by exactly 1.
template <int32_t D>
__device__ __forceinline__ void weigh(Scores& s, RowSums<D>& sums, float (&factor)[2], float scale)
{
#pragma unroll
    for (int32_t r = 0; r < 2; ++r)
    {
        float m = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
        for (int32_t n = 1; n < kKEYS / 8; ++n)
        {
            m = fmaxf(m, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        }
        m = fmaxf(m, __shfl_xor_sync(kFULL_WARP, m, 1));
        m = fmaxf(m, __shfl_xor_sync(kFULL_WARP, m, 2));
        m = fmaxf(m, sums.m[r]);
        float const base = m == -INFINITY ? 0.0F : m * scale;       // -inf - -inf would be NaN
        factor[r] = powerOfTwo(__fmul_rn(sums.m[r], scale) - base); // fused, 0 would be what rounding left
        sums.m[r] = m;
        float l = 0.0F;
#pragma unroll
        for (int32_t n = 0; n < kKEYS / 8; ++n)
        {
#pragma unroll
            for (int32_t c = 0; c < 2; ++c)
            {
                float& weight = s[4 * n + 2 * r + c];
                weight = powerOfTwo(fmaf(weight, scale, -base));
                l += weight;
            }
        }
        sums.l[r] = fmaf(sums.l[r], factor[r], l);
    }
}

template <int32_t D>
__device__ __forceinline__ void multiplySums(RowSums<D>& sums, float const (&factor)[2])
{
    if (!__any_sync(kFULL_WARP, factor[0] != 1.0F || factor[1] != 1.0F))
    {
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < D / 2; ++i)
    {
        sums.o[i] *= factor[i / 2 % 2];
    }
}

// What a lane has of the weights as the product left them is what the next product needs, 16 keys at a time.
template <typename T>
__device__ __forceinline__ void packWeights(uint32_t (&p)[kKEYS / 16][4], Scores const& s)
{
#pragma unroll
    for (int32_t i = 0; i < kKEYS / 4; ++i)
    {
        p[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
}

// Divides by the sum of weights and stores the warpgroup's rows, through their place among the queries.
template <typename T, int32_t D>
__device__ __forceinline__ void storeRows(View const& view, Part const& part, RowSums<D> const& sums,
    unsigned char* queries, int32_t group, int32_t thread, T* out)
{
    constexpr int32_t kPIECES = D / 8;
    int32_t const lane = thread % 32;
    int32_t const firstRow = group * kGROUP_ROWS + thread / 32 * 16;
    meetAt<kGROUP_THREADS>(kROWS_MEET + group); // all have multiplied with their queries
#pragma unroll
    for (int32_t r = 0; r < 2; ++r)
    {
        float l = sums.l[r];
        l += __shfl_xor_sync(kFULL_WARP, l, 1);
        l += __shfl_xor_sync(kFULL_WARP, l, 2);
        float const inverse = l == 0.0F ? 0.0F : 1.0F / l;
        int32_t const row = firstRow + r * 8 + lane / 4;
#pragma unroll
        for (int32_t n = 0; n < kPIECES; ++n)
        {
            *reinterpret_cast<uint32_t*>(queries + turnedAt(row, n) + lane % 4 * 4)
                = pack<T>(sums.o[4 * n + 2 * r] * inverse, sums.o[4 * n + 2 * r + 1] * inverse);
        }
    }
    __syncwarp();
    for (int32_t i = lane; i < 16 * kPIECES; i += 32)
    {
        int32_t const row = firstRow + i / kPIECES;
        int32_t const piece = i % kPIECES;
        if (row < part.rows)
        {
            *reinterpret_cast<uint4*>(out + rowAt<D>(view, part, row) + piece * 8)
                = load16(queries + turnedAt(row, piece));
        }
    }
}

// A multiplying warpgroup, number `group`.
template <typename T, int32_t D>
__device__ __forceinline__ void attend(View const& view, Stretch const& stretch, Part const& part, int32_t tiles,
    unsigned char* memory, Barriers const& barriers, int32_t group, T const* q, T* out)
{
    using Shared = HopperShared<D>;
    uint32_t const shared = sharedAddress(memory);
    int32_t const thread = static_cast<int32_t>(threadIdx.x) % kGROUP_THREADS;
    int32_t const lane = thread % 32;
    loadQueries<T, D>(view, part, q, group, thread, shared);
    uint32_t const queries = shared + static_cast<uint32_t>(group * kGROUP_ROWS * 128);
    auto const keysAt = [&](int32_t tile)
    { return shared + static_cast<uint32_t>(Shared::kKEYS_AT + tile % kSTAGES * Shared::kKEY_BYTES); };
    auto const valuesAt = [&](int32_t tile)
    { return shared + static_cast<uint32_t>(Shared::kVALUES_AT + tile % kSTAGES * Shared::kVALUE_BYTES); };
    auto const hasRead = [&](uint32_t barrier)
    {
        if (lane == 0)
        {
            arrive(barrier);
        }
    };

    // Positions of rows; those that there are not are as the last one, and are not stored.
    auto const positionOf
        = [&](int32_t row) { return stretch.start + part.first + min(row, part.rows - 1) / view.group; };
    int32_t const lowest = positionOf(group * kGROUP_ROWS);
    int32_t const row = group * kGROUP_ROWS + thread / 32 * 16 + lane / 4;
    int32_t const positions[2] = {positionOf(row), positionOf(row + 8)};

    float const scale = view.scale * kLOG2_E;
    RowSums<D> sums;
#pragma unroll
    for (int32_t i = 0; i < D / 2; ++i)
    {
        sums.o[i] = 0.0F;
    }
    sums.m[0] = sums.m[1] = -INFINITY;
    sums.l[0] = sums.l[1] = 0.0F;
    uint32_t p[kKEYS / 16][4];

    auto const step = [&](int32_t tile, auto isFirst)
    {
        constexpr bool kFIRST = decltype(isFirst)::value;
        int32_t const stage = tile % kSTAGES;
        int32_t const before = (tile - 1) % kSTAGES;
        Scores s;
        await(barriers.keysThere(stage), phaseOf(tile));
        if constexpr (!kFIRST)
        {
            await(barriers.valuesThere(before), phaseOf(tile - 1));
        }
        fenceForProducts();
        meetAt<kCONSUMERS * kGROUP_THREADS>(kTURN + group);
        startScores<T, D>(s, queries, keysAt(tile));
        if constexpr (!kFIRST)
        {
            startValues<T, D>(sums, p, valuesAt(tile - 1));
        }
        if (group == 0 || tile + 1 < tiles)
        {
            arriveAt<kCONSUMERS * kGROUP_THREADS>(kTURN + 1 - group);
        }
        waitForProducts<kFIRST ? 0 : 1>();
        settle(s);
        hasRead(barriers.keysRead(stage));
        if (tile * kKEYS + kKEYS - 1 > lowest)
        {
            int32_t const first = tile * kKEYS + lane % 4 * 2;
            maskScores(s, {positions[0] - first, positions[1] - first});
        }
        float factor[2];
        weigh<D>(s, sums, factor, scale);
        if constexpr (!kFIRST)
        {
            waitForProducts<0>();
            settle(sums.o);
            hasRead(barriers.valuesRead(before));
            multiplySums<D>(sums, factor);
        }
        packWeights<T>(p, s);
    };
    if (group == 1)
    {
        arriveAt<kCONSUMERS * kGROUP_THREADS>(kTURN); // the other one begins
    }
    step(0, std::true_type{});
#pragma unroll 1
    for (int32_t tile = 1; tile < tiles; ++tile)
    {
        step(tile, std::false_type{});
    }
    await(barriers.valuesThere((tiles - 1) % kSTAGES), phaseOf(tiles - 1));
    fenceForProducts();
    startValues<T, D>(sums, p, valuesAt(tiles - 1));
    waitForProducts<0>();
    settle(sums.o);
    storeRows<T, D>(view, part, sums, memory, group, thread, out);
}

template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS, 1) attendStretchHopperKernel(
    __grid_constant__ View const view, int32_t layer, Stretch const stretch, T const* __restrict__ q, T* out)
{
    if constexpr (kHOPPER)
    {
        unsigned char* memory = dynamicShared<unsigned char>();
        memory += (1024 - sharedAddress(memory) % 1024) % 1024;
        uint32_t const shared = sharedAddress(memory);
        Barriers const barriers{shared + static_cast<uint32_t>(HopperShared<D>::kBARRIERS_AT)};
        if (threadIdx.x == 0)
        {
            barriers.init();
        }
        __syncthreads();
        Part const part = partOf(view, stretch);
        int32_t const tiles = (part.end + kKEYS - 1) / kKEYS;
        int32_t const group = static_cast<int32_t>(threadIdx.x) / kGROUP_THREADS;
        if (group == 0)
        {
            shrinkRegisters<kCOPYING_REGISTERS>();
            copyTiles<T, D>(view, layer, stretch, part, tiles, shared, barriers);
        }
        else
        {
            growRegisters<kMULTIPLYING_REGISTERS>();
            attend<T, D>(view, stretch, part, tiles, memory, barriers, group - 1, q, out);
        }
    }
    else
    {
        __trap(); // built for another device: see View::isHopper
    }
}

} // namespace

cudaError_t attendStretchHopper(
    View const& view, int32_t layer, Stretch const& stretch, void const* q, void* out, cudaStream_t stream)
{
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            constexpr int32_t kSIZE = decltype(size)::value;
            constexpr int32_t kBYTES = HopperShared<kSIZE>::kBYTES;
            auto const kernel = attendStretchHopperKernel<T, kSIZE>;
            return launch(kernel, partBlocks(view, stretch), kTHREADS, kBYTES, stream, view, layer, stretch,
                static_cast<T const*>(q), static_cast<T*>(out));
        });
}

} // namespace trtllm_shadowkv::kernels
