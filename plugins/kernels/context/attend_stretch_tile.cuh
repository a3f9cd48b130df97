// A warp's part of causal attention: 32 query rows against tiles of 64 keys, on tensor cores.
//
// In shared memory queries and keys are rows of D elements, in pieces of 16 bytes whose order is turned from row to row,
// so that 8 rows' pieces of one column are in different banks (pieceAt); values are units [D][8 tokens] as they come, 8
// rows of which are 128 consecutive bytes. With lane (g, t) = (lane / 4, lane % 4) a lane has, of each 16 query rows,
// rows g and g + 8, and of each 8 keys, or dimensions, 2 t and 2 t + 1.
#pragma once

#include "kernels/context/attend_stretch_part.cuh"
#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kBLOCK_WARPS = 4;
constexpr int32_t kTHREADS = kBLOCK_WARPS * 32;
constexpr int32_t kWARP_ROWS = 32;
constexpr int32_t kKEYS = 64; // of a tile; tiles begin at multiples of it
constexpr int32_t kTILE_UNITS = kKEYS / kUNIT;
static_assert(kBLOCK_WARPS * kWARP_ROWS == kROWS, "every row has a warp");
static_assert(kLIVE_PAGE_TOKENS % kKEYS == 0, "a tile is in one page");

template <int32_t D>
struct StretchShared
{
    static constexpr int32_t kROW_BYTES = D * 2;
    static constexpr int32_t kQUERY_BYTES = kROWS * kROW_BYTES;
    static constexpr int32_t kKEY_BYTES = kKEYS * kROW_BYTES;
    static constexpr int32_t kSTAGE_BYTES = 2 * kKEY_BYTES;                // keys, then values
    static constexpr int32_t kPOSITIONS = kQUERY_BYTES + 2 * kSTAGE_BYTES; // one tile comes while one is attended to
    static constexpr int32_t kBYTES = kPOSITIONS + kROWS * 4;
};

// What pieces of a row are turned by: bits of their number. Rows of 96 elements begin at every second half of 128 bytes.
template <int32_t D>
__device__ __forceinline__ int32_t turnOf(int32_t row)
{
    return D == 96 ? row / 2 % 4 : row % 8;
}

// Bytes from row 0 to a piece of a row.
template <int32_t D>
__device__ __forceinline__ int32_t pieceAt(int32_t row, int32_t piece)
{
    return row * StretchShared<D>::kROW_BYTES + (piece ^ turnOf<D>(row)) * 16;
}

// o[i][n]: of 16 rows, number i, and dimensions 8 n to 8 n + 7, as mma leaves it; m, the maximum of scores before they
// are scaled, and l, the lane's part of the sum of weights, of rows g and g + 8.
template <int32_t D>
struct RowSums
{
    float o[2][D / 8][4];
    float m[2][2];
    float l[2][2];
};

// [i][n]: of 16 rows and 8 keys.
using Scores = float[2][kTILE_UNITS][4];

// Where a lane reads matrices from, in bytes of shared memory.
struct LaneAddresses
{
    uint32_t query;  // the row that the lane names
    uint32_t key;    // in the first stage
    uint32_t value;  // in the first stage
    uint32_t queryX; // what to exclusive-or the column's bytes with
    uint32_t keyX;
};

// Bytes from a row's begin to the lane's piece of step k of 16 columns; `x` as in LaneAddresses. What is turned is in one
// block of pieces, so the compiler needs few registers for all steps.
template <int32_t D>
__device__ __forceinline__ uint32_t columnAt(int32_t k, uint32_t x)
{
    constexpr uint32_t kTURNED = D == 96 ? 64 : 128;
    uint32_t const column = static_cast<uint32_t>(k) * 32;
    return column / kTURNED * kTURNED + (column % kTURNED ^ x);
}

// Matrices of a load: queries (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); keys (0-7, k 0-7), (0-7, 8-15),
// (8-15, 0-7), (8-15, 8-15); values (unit 0, d 0-7), (1, 0-7), (0, 8-15), (1, 8-15).
template <int32_t D>
__device__ __forceinline__ LaneAddresses laneAddresses(uint32_t shared, int32_t warp, int32_t lane)
{
    using Shared = StretchShared<D>;
    int32_t const row = lane % 8;
    int32_t const first = lane / 8 % 2;
    int32_t const second = lane / 16;
    LaneAddresses at;
    at.query = shared + (warp * kWARP_ROWS + first * 8 + row) * Shared::kROW_BYTES;
    at.queryX = (second ^ turnOf<D>(row)) * 16; // the turn of row + 8 is the same
    at.key = shared + Shared::kQUERY_BYTES + (second * 8 + row) * Shared::kROW_BYTES;
    at.keyX = (first ^ turnOf<D>(row)) * 16;
    at.value = shared + Shared::kQUERY_BYTES + Shared::kKEY_BYTES + first * (D * 16) + (second * 8 + row) * 16;
    return at;
}

template <int32_t D>
__device__ __forceinline__ void clear(RowSums<D>& sums)
{
#pragma unroll
    for (int32_t i = 0; i < 2; ++i)
    {
#pragma unroll
        for (int32_t n = 0; n < D / 8; ++n)
        {
            sums.o[i][n][0] = sums.o[i][n][1] = sums.o[i][n][2] = sums.o[i][n][3] = 0.0F;
        }
        sums.m[i][0] = sums.m[i][1] = -INFINITY;
        sums.l[i][0] = sums.l[i][1] = 0.0F;
    }
}

// s = Q K^T of the stage that `stage` bytes lead to.
template <typename T, int32_t D>
__device__ __forceinline__ void score(Scores& s, LaneAddresses const& at, uint32_t stage)
{
    constexpr uint32_t kTILE_ROWS = 16 * StretchShared<D>::kROW_BYTES;
#pragma unroll
    for (int32_t n = 0; n < kTILE_UNITS; ++n)
    {
#pragma unroll
        for (int32_t c = 0; c < 4; ++c)
        {
            s[0][n][c] = s[1][n][c] = 0.0F;
        }
    }
    uint32_t const keys = at.key + stage;
#pragma unroll
    for (int32_t k = 0; k < D / 16; ++k)
    {
        uint32_t q[2][4];
        uint32_t const query = at.query + columnAt<D>(k, at.queryX);
        loadMatrices(q[0], query);
        loadMatrices(q[1], query + kTILE_ROWS);
#pragma unroll
        for (int32_t n = 0; n < kTILE_UNITS / 2; ++n)
        {
            uint32_t b[4];
            loadMatrices(b, keys + columnAt<D>(k, at.keyX) + static_cast<uint32_t>(n) * kTILE_ROWS);
#pragma unroll
            for (int32_t j = 0; j < 2; ++j)
            {
#pragma unroll
                for (int32_t i = 0; i < 2; ++i)
                {
                    mma<T>(s[i][2 * n + j], q[i][0], q[i][1], q[i][2], q[i][3], b[2 * j], b[2 * j + 1]);
                }
            }
        }
    }
}

// Scores of keys past a row's own position become -inf. `positions`: of the warp's rows; `first`: of the tile's keys.
__device__ __forceinline__ void maskScores(Scores& s, int32_t const* positions, int32_t first, int32_t lane)
{
#pragma unroll
    for (int32_t i = 0; i < 2; ++i)
    {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r)
        {
            int32_t const last = positions[i * 16 + r * 8 + lane / 4] - first - lane % 4 * 2;
#pragma unroll
            for (int32_t n = 0; n < kTILE_UNITS; ++n)
            {
#pragma unroll
                for (int32_t c = 0; c < 2; ++c)
                {
                    s[i][n][2 * r + c] = n * 8 + c <= last ? s[i][n][2 * r + c] : -INFINITY;
                }
            }
        }
    }
}

// Turns scores into weights, in place, and brings the sums up to the new maximum. `scale`: of scores, log2(e) included.
// A row whose maximum stays is multiplied by exactly 1, or not at all.
template <int32_t D>
__device__ __forceinline__ void weigh(Scores& s, RowSums<D>& sums, float scale)
{
    float factor[2][2];
    bool moved = false;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i)
    {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r)
        {
            float m = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
            for (int32_t n = 1; n < kTILE_UNITS; ++n)
            {
                m = fmaxf(m, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
            }
            m = fmaxf(m, __shfl_xor_sync(kFULL_WARP, m, 1));
            m = fmaxf(m, __shfl_xor_sync(kFULL_WARP, m, 2));
            m = fmaxf(m, sums.m[i][r]);
            float const base = m == -INFINITY ? 0.0F : m * scale;             // -inf - -inf would be NaN
            factor[i][r] = powerOfTwo(__fmul_rn(sums.m[i][r], scale) - base); // fused, 0 would be what rounding left
            sums.m[i][r] = m;
            float l = 0.0F;
#pragma unroll
            for (int32_t n = 0; n < kTILE_UNITS; ++n)
            {
#pragma unroll
                for (int32_t c = 2 * r; c < 2 * r + 2; ++c)
                {
                    s[i][n][c] = powerOfTwo(fmaf(s[i][n][c], scale, -base));
                    l += s[i][n][c];
                }
            }
            sums.l[i][r] = sums.l[i][r] * factor[i][r] + l;
            moved = moved || factor[i][r] != 1.0F;
        }
    }
    if (__any_sync(kFULL_WARP, moved))
    {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int32_t n = 0; n < D / 8; ++n)
            {
#pragma unroll
                for (int32_t c = 0; c < 4; ++c)
                {
                    sums.o[i][n][c] *= factor[i][c / 2];
                }
            }
        }
    }
}

// O += P V; of each 16 keys, what a lane has of P as mma left it is what it needs for the next.
template <typename T, int32_t D>
__device__ __forceinline__ void addValues(RowSums<D>& sums, Scores const& s, LaneAddresses const& at, uint32_t stage)
{
    uint32_t const values = at.value + stage;
#pragma unroll
    for (int32_t k = 0; k < kTILE_UNITS / 2; ++k)
    {
        uint32_t p[2][4];
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
        {
#pragma unroll
            for (int32_t j = 0; j < 4; ++j)
            {
                p[i][j] = pack<T>(s[i][2 * k + j / 2][j % 2 * 2], s[i][2 * k + j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int32_t n = 0; n < D / 16; ++n)
        {
            uint32_t b[4];
            loadMatrices(b, values + static_cast<uint32_t>(k * 2 * D * 16 + n * 256));
#pragma unroll
            for (int32_t j = 0; j < 2; ++j)
            {
#pragma unroll
                for (int32_t i = 0; i < 2; ++i)
                {
                    mma<T>(sums.o[i][2 * n + j], p[i][0], p[i][1], p[i][2], p[i][3], b[2 * j], b[2 * j + 1]);
                }
            }
        }
    }
}

} // namespace
} // namespace trtllm_shadowkv::kernels
