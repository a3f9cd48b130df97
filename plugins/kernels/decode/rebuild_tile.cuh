// Keys of a tile of 32 tokens of one head: its layout in shared memory, the product A B, RoPE, the store.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTILE_TOKENS = 32;
constexpr int32_t kTILE_UNITS = kTILE_TOKENS / kUNIT;
constexpr int32_t kPIECE = 16;      // bytes of a copy
constexpr int32_t kK_BLOCK = 32;    // columns of A for which a lane reads a piece of a row: 8 of them, two steps of mma
constexpr int32_t kSLAB = 5;        // such blocks of B in registers. Of a rank over 160, B is read again for each tile
constexpr uint32_t kONE = 1U << 20; // 1 in fixed point

// What follows from the rank.
struct Layout
{
    int32_t rank;
    int32_t blocks;      // of kK_BLOCK columns, the last one perhaps half a block
    int32_t pitch;       // bytes from row to row: 64 more than a multiple of 128, so that reads have no bank conflicts
    int32_t stageBytes;  // rows of A, then turns of RoPE
    uint32_t reciprocal; // of a row's pieces, in fixed point rounded up: exact for the pieces of a unit

    Layout(int32_t r, int32_t headSize)
        : rank{r}, blocks{(r + kK_BLOCK - 1) / kK_BLOCK}, pitch{(blocks | 1) * kK_BLOCK * 2},
          stageBytes{kTILE_TOKENS * pitch + kTILE_UNITS * headSize / 2 * 8}, reciprocal{(kONE + r / 8 - 1) / (r / 8)}
    {
    }
};

// The lane's part of B as mma takes it, [half][block of k][step of 16]: a tile of the warp's dimensions and one of
// their partners. Rows g and g + 8 of a tile are dimensions 2g and 2g + 1, so that a lane's results are words.
using Columns = uint32_t[2][kSLAB][2][4];

// [half][unit], as mma leaves it: dimensions 2g, 2g, 2g + 1, 2g + 1 and tokens 2t, 2t + 1, 2t, 2t + 1.
using Sums = float[2][kTILE_UNITS][4];

// `rows`: those of the head and the lane's dimensions.
template <typename T, int32_t D>
__device__ __forceinline__ void loadColumns(T const* rows, Layout const& layout, int32_t firstBlock, Columns& columns)
{
    int32_t const t = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half)
    {
#pragma unroll
        for (int32_t block = 0; block < kSLAB; ++block)
        {
            int32_t const k = (firstBlock + block) * kK_BLOCK + t * 8;
            // Past the rank: zeros, by a mask. Without an operation on them ptxas leaves the words as they were loaded,
            // and puts those of two rows together again before every mma.
            uint32_t const mask = k < layout.rank ? ~0U : 0U;
            T const* const from = rows + half * (D / 2) * layout.rank + min(k, layout.rank - 8);
            uint4 const x0 = __ldg(reinterpret_cast<uint4 const*>(from));
            uint4 const x1 = __ldg(reinterpret_cast<uint4 const*>(from + layout.rank));
            uint32_t (&to)[2][4] = columns[half][block];
            to[0][0] = x0.x & mask;
            to[0][1] = x1.x & mask;
            to[0][2] = x0.y & mask;
            to[0][3] = x1.y & mask;
            to[1][0] = x0.z & mask;
            to[1][1] = x1.z & mask;
            to[1][2] = x0.w & mask;
            to[1][3] = x1.w & mask;
        }
    }
}

// `rows`: the lane's piece of token g of the tile's first unit. Not kWHOLE: only the first `blocks`.
template <typename T, bool kWHOLE>
__device__ __forceinline__ void multiply(
    char const* rows, int32_t pitch, int32_t blocks, Columns const& columns, Sums& sums)
{
#pragma unroll
    for (int32_t block = 0; block < kSLAB; ++block)
    {
        if (kWHOLE || block < blocks)
        {
            uint4 tokens[kTILE_UNITS];
#pragma unroll
            for (int32_t unit = 0; unit < kTILE_UNITS; ++unit)
            {
                tokens[unit] = *reinterpret_cast<uint4 const*>(rows + unit * kUNIT * pitch + block * kK_BLOCK * 2);
            }
#pragma unroll
            for (int32_t i = 0; i < 2 * kTILE_UNITS; ++i)
            {
                int32_t const half = i % 2;
                uint32_t const(&x)[4] = columns[half][block][0];
                mma<T>(sums[half][i / 2], x[0], x[1], x[2], x[3], tokens[i / 2].x, tokens[i / 2].y);
            }
#pragma unroll
            for (int32_t i = 0; i < 2 * kTILE_UNITS; ++i)
            {
                int32_t const half = i % 2;
                uint32_t const(&x)[4] = columns[half][block][1];
                mma<T>(sums[half][i / 2], x[0], x[1], x[2], x[3], tokens[i / 2].z, tokens[i / 2].w);
            }
        }
    }
}

// Rotates and stores what the lane has of a unit: two tokens, `to` the first one's. (cos, sin) of the lane's two
// frequencies: `turn` of the unit and `steps` of the tokens.
template <typename T, int32_t D>
__device__ __forceinline__ void storeUnit(
    float const (&x)[4], float const (&y)[4], float4 turn, float4 const (&steps)[2], T* to)
{
#pragma unroll
    for (int32_t token = 0; token < 2; ++token)
    {
        float4 const step = steps[token];
        float const cos0 = turn.x * step.x - turn.y * step.y;
        float const sin0 = turn.x * step.y + turn.y * step.x;
        float const cos1 = turn.z * step.z - turn.w * step.w;
        float const sin1 = turn.z * step.w + turn.w * step.z;
        float const x0 = x[token];
        float const x1 = x[token + 2];
        float const y0 = y[token];
        float const y1 = y[token + 2];
        T* const at = to + token * D;
        *reinterpret_cast<uint32_t*>(at) = pack<T>(x0 * cos0 - y0 * sin0, x1 * cos1 - y1 * sin1);
        *reinterpret_cast<uint32_t*>(at + D / 2) = pack<T>(y0 * cos0 + x0 * sin0, y1 * cos1 + x1 * sin1);
    }
}

} // namespace
} // namespace trtllm_shadowkv::kernels
