// Attention of a warp: tiles of 32 tokens, 4 units of 8, in registers.
//
// S^T = K Q^T has 16 tokens as rows (two such tiles, s = 0 and 1) and query heads as columns; O^T += V^T P^T has the
// head size as rows. Tokens are dealt to the rows of tile s in such a way that what a lane has of P is, after a
// transpose of 8 x 8, what it needs of P^T, while it reads V in pieces of a whole unit:
//   row g      token 4 s + g % 2      of unit g / 2
//   row 8 + g  token 4 s + 2 + g % 2  of unit g / 2
// So a lane has scores of tokens g % 2 + 2 r, r = 0 to 3, of unit g / 2, heads 8 n + 2 t and + 1, and of V rows
// d = 8 k + g of unit t. Scores are kept in powers of two: log2(e) is part of the scale.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{

inline constexpr int32_t kTILE_UNITS = 4;
inline constexpr int32_t kTILE_TOKENS = kTILE_UNITS * kUNIT;

// Of lane (g, t): o[i][n] is d = 16 i + g, heads 8 n + 2 t, + 1, then d = 16 i + 8 + g; m and l are of the same two
// heads.
template <int32_t D, int32_t NT>
struct Accumulator
{
    float o[D / 16][NT][4];
    float m[NT][2];
    float l[NT][2];
};

// 8 bytes: one row of a unit of e4m3 values; 16 bytes: of T values.
template <bool kSCALED>
using ValuePiece = std::conditional_t<kSCALED, uint2, uint4>;

// What to subtract before powerOfTwo: -inf - -inf would be NaN.
__device__ __forceinline__ float finiteMaximum(float m)
{
    return m == -INFINITY ? 0.0F : m;
}

// Over the lanes that hold the same heads.
__device__ __forceinline__ float tokenMax(float v)
{
#pragma unroll
    for (int32_t offset = 4; offset < 32; offset *= 2)
    {
        v = fmaxf(v, __shfl_xor_sync(kFULL_WARP, v, offset));
    }
    return v;
}

template <int32_t D, int32_t NT>
__device__ __forceinline__ void clear(Accumulator<D, NT>& acc)
{
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
        acc.m[n][0] = acc.m[n][1] = -INFINITY;
        acc.l[n][0] = acc.l[n][1] = 0.0F;
#pragma unroll
        for (int32_t i = 0; i < D / 16; ++i)
        {
            acc.o[i][n][0] = acc.o[i][n][1] = acc.o[i][n][2] = acc.o[i][n][3] = 0.0F;
        }
    }
}

// `unit` is the lane's: that of g / 2.
template <int32_t D>
__device__ __forceinline__ void loadKeys(uint4 (&keys)[4][D / 32], unsigned char const* unit, int32_t lane)
{
    unsigned char const* const key = unit + lane / 4 % 2 * (2 * D) + lane % 4 * 16;
#pragma unroll
    for (int32_t r = 0; r < 4; ++r)
    {
#pragma unroll
        for (int32_t j = 0; j < D / 32; ++j)
        {
            keys[r][j] = loadStream(key + r * (4 * D) + j * 64);
        }
    }
}

// `unit` is the lane's: that of t.
template <int32_t D, typename Piece>
__device__ __forceinline__ void loadValues(Piece (&values)[D / 8], unsigned char const* unit, int32_t lane)
{
    unsigned char const* const value = unit + lane / 4 * static_cast<int32_t>(sizeof(Piece));
#pragma unroll
    for (int32_t k = 0; k < D / 8; ++k)
    {
        if constexpr (std::is_same_v<Piece, uint2>)
        {
            values[k] = loadStream2(value + k * 8 * sizeof(Piece));
        }
        else
        {
            values[k] = loadStream(value + k * 8 * sizeof(Piece));
        }
    }
}

// s = K Q^T. The query is in `held`, or if there are more than 8 heads in `shared`: registers are short.
template <typename T, int32_t D, int32_t NT>
__device__ __forceinline__ void score(float (&s)[2][NT][4], uint4 const (&keys)[4][D / 32], uint4 const (&held)[D / 32],
    uint4 const (&shared)[NT][D / 32][32], int32_t lane)
{
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
#pragma unroll
        for (int32_t k = 0; k < 4; ++k)
        {
            s[0][n][k] = s[1][n][k] = 0.0F;
        }
    }
#pragma unroll
    for (int32_t j = 0; j < D / 32; ++j)
    {
#pragma unroll
        for (int32_t n = 0; n < NT; ++n)
        {
            uint4 const b = NT == 1 ? held[j] : loadShared(shared[n][j][lane]);
#pragma unroll
            for (int32_t h = 0; h < 2; ++h)
            {
                uint4 const& low = keys[2 * h][j];
                uint4 const& high = keys[2 * h + 1][j];
                mma<T>(s[h][n], low.x, high.x, low.y, high.y, b.x, b.y);
                mma<T>(s[h][n], low.z, high.z, low.w, high.w, b.z, b.w);
            }
        }
    }
}

// Turns scores into P, in place, and brings m, l and O up to the new maximum. Token 2 r of the lane is attended if
// 2 r < tokens.
//
// kSCALED: `log` is log2 of the scale of the lane's chunk. It goes into the exponent, so that P, rounded to 16 bits,
// never exceeds 1 and reaches it, whatever the scales are. `top` is then the maximum of score + log: O is in units of
// 2^top, l of 2^m.
template <int32_t D, int32_t NT, bool kSCALED>
__device__ __forceinline__ void weighTokens(
    float (&s)[2][NT][4], Accumulator<D, NT>& acc, float (&top)[NT][2], int32_t tokens, float scale, float log)
{
    float rescale[NT][2];
    bool moved = false;
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
#pragma unroll
        for (int32_t c = 0; c < 2; ++c)
        {
            float x[4];
            float m = -INFINITY;
            float highest = -INFINITY;
#pragma unroll
            for (int32_t r = 0; r < 4; ++r)
            {
                x[r] = 2 * r < tokens ? s[r / 2][n][r % 2 * 2 + c] * scale : -INFINITY;
                m = fmaxf(m, x[r]);
            }
            m = fmaxf(acc.m[n][c], tokenMax(m));
            float base = finiteMaximum(m);
            rescale[n][c] = powerOfTwo(acc.m[n][c] - base);
            acc.m[n][c] = m;
            acc.l[n][c] *= rescale[n][c];
#pragma unroll
            for (int32_t r = 0; r < 4; ++r)
            {
                float const e = powerOfTwo(x[r] - base);
                acc.l[n][c] += e;
                s[r / 2][n][r % 2 * 2 + c] = e;
            }
            if constexpr (kSCALED)
            {
#pragma unroll
                for (int32_t r = 0; r < 4; ++r)
                {
                    x[r] = 2 * r < tokens ? x[r] + log : -INFINITY; // log may be NaN
                    highest = fmaxf(highest, x[r]);
                }
                highest = fmaxf(top[n][c], tokenMax(highest));
                base = finiteMaximum(highest);
                rescale[n][c] = powerOfTwo(top[n][c] - base);
                top[n][c] = highest;
#pragma unroll
                for (int32_t r = 0; r < 4; ++r)
                {
                    s[r / 2][n][r % 2 * 2 + c] = powerOfTwo(x[r] - base);
                }
            }
            moved = moved || rescale[n][c] != 1.0F;
        }
    }
    if (__any_sync(kFULL_WARP, moved))
    {
#pragma unroll
        for (int32_t i = 0; i < D / 16; ++i)
        {
#pragma unroll
            for (int32_t k = 0; k < NT * 4; ++k)
            {
                acc.o[i][k / 4][k % 4] *= rescale[k / 4][k % 2];
            }
        }
    }
}

// Zeroes V of tokens past the end: what lies there may be NaN. `tokens` are left of the lane's unit.
template <int32_t D>
__device__ __forceinline__ void maskValues(uint4 (&values)[D / 8], int32_t tokens)
{
    uint32_t keep[4];
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair)
    {
        keep[pair] = tokens >= 2 * pair + 2 ? 0xffffffffU : tokens == 2 * pair + 1 ? 0xffffU : 0U;
    }
#pragma unroll
    for (int32_t k = 0; k < D / 8; ++k)
    {
        values[k].x &= keep[0];
        values[k].y &= keep[1];
        values[k].z &= keep[2];
        values[k].w &= keep[3];
    }
}

// Two tokens' values of one row, as 16-bit elements: pair number 0 to 3 of the unit.
__device__ __forceinline__ uint32_t valuePair(uint4 const& v, int32_t pair)
{
    return pair == 0 ? v.x : pair == 1 ? v.y : pair == 2 ? v.z : v.w;
}

__device__ __forceinline__ uint32_t valuePair(uint2 const& v, int32_t pair)
{
    return halvesOfE4m3(static_cast<uint16_t>((pair < 2 ? v.x : v.y) >> (pair % 2 * 16)));
}

// O += V^T P^T; P is the type that V is, or is converted to.
template <typename P, int32_t D, int32_t NT, typename Piece>
__device__ __forceinline__ void addValues(
    Accumulator<D, NT>& acc, Piece const (&values)[D / 8], float const (&s)[2][NT][4])
{
    uint32_t p[2][NT][2];
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
#pragma unroll
        for (int32_t r = 0; r < 4; ++r)
        {
            float const* const row = &s[r / 2][n][r % 2 * 2];
            p[r / 2][n][r % 2] = transpose8x8(pack<P>(row[0], row[1]));
        }
    }
#pragma unroll
    for (int32_t i = 0; i < D / 16; ++i)
    {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h)
        {
            uint32_t const a0 = valuePair(values[2 * i], 2 * h);
            uint32_t const a1 = valuePair(values[2 * i + 1], 2 * h);
            uint32_t const a2 = valuePair(values[2 * i], 2 * h + 1);
            uint32_t const a3 = valuePair(values[2 * i + 1], 2 * h + 1);
#pragma unroll
            for (int32_t n = 0; n < NT; ++n)
            {
                mma<P>(acc.o[i][n], a0, a1, a2, a3, p[h][n][0], p[h][n][1]);
            }
        }
    }
}

// Sums l over the lanes; kSCALED: O from units of 2^top to units of 2^m.
template <int32_t D, int32_t NT, bool kSCALED>
__device__ __forceinline__ void finish(Accumulator<D, NT>& acc, float const (&top)[NT][2])
{
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
#pragma unroll
        for (int32_t c = 0; c < 2; ++c)
        {
#pragma unroll
            for (int32_t offset = 4; offset < 32; offset *= 2)
            {
                acc.l[n][c] += __shfl_xor_sync(kFULL_WARP, acc.l[n][c], offset);
            }
            if constexpr (kSCALED)
            {
                float const factor = powerOfTwo(top[n][c] - finiteMaximum(acc.m[n][c]));
#pragma unroll
                for (int32_t i = 0; i < D / 16; ++i)
                {
                    acc.o[i][n][c] *= factor;
                    acc.o[i][n][2 + c] *= factor;
                }
            }
        }
    }
}

} // namespace trtllm_shadowkv::kernels
