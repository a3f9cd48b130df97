#include "kernels/decode/decode.h"
#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 128;
constexpr int32_t kWARP = 32;
constexpr int32_t kWARPS = kTHREADS / kWARP;
constexpr int32_t kWARP_UNITS = 4; // so that every element of B that is read is used for 32 tokens
constexpr int32_t kBLOCK_UNITS = 32;

// A tensor-core tile is 16 dimensions (rows of B's transpose) by the 8 tokens of a unit. A warp takes kTILES tiles of
// dimensions below D / 2 and their RoPE partners D / 2 further. Rows g and g + 8 of a tile are two neighbouring
// dimensions, and of two tiles four, so that a lane's results are the words that it stores:
//   row g + 8 e of tile m is dimension kPART part + kLANE g + kSTEP m + e
template <int32_t D>
struct Shape
{
    static constexpr int32_t kPARTS = D == 128 ? 2 : 1; // warps that share the dimensions of the same tokens
    static constexpr int32_t kTILES = D / 32 / kPARTS;
    static constexpr int32_t kPART = D / 2 / kPARTS;
    static constexpr int32_t kLANE = D == 96 ? 2 : 4;
    static constexpr int32_t kSTEP = D == 96 ? 16 : 2;
    static constexpr int32_t kPASS_UNITS = kWARPS / kPARTS * kWARP_UNITS; // of a thread block
};

// [dimension, or its partner][tile][unit], as mma leaves it: rows g, g, g + 8, g + 8 and tokens 2t, 2t+1, 2t, 2t+1.
template <int32_t D>
using Sums = float[2][Shape<D>::kTILES][kWARP_UNITS][4];

// A unit of 8 tokens that is missing in the chunk cache.
struct Unit
{
    int32_t chunk;
    int32_t slot;  // of the chunk cache
    int32_t token; // of the chunk
};

__device__ __forceinline__ Unit unitOf(View const& v, Entry const* entries, int32_t unit)
{
    int32_t const shift = v.chunkShift - 3;
    Entry const entry = entries[unit >> shift];
    return {entry.chunk, entry.slot, (unit & ((1 << shift) - 1)) * kUNIT};
}

// kSTEPS (1 or 2) steps along r, from the lane's own k on: it reads 8 kSTEPS bytes of every row. `a`: token g of every
// unit. `b`: the lane's dimensions.
template <typename T, int32_t D, int32_t kSTEPS>
__device__ __forceinline__ void multiply(
    T const* const (&a)[kWARP_UNITS], T const* const (&b)[2][Shape<D>::kTILES][2], int32_t k, Sums<D>& sums)
{
    using S = Shape<D>;
    using Piece = std::conditional_t<kSTEPS == 2, uint4, uint2>;
    Piece tokens[kWARP_UNITS];
#pragma unroll
    for (int32_t i = 0; i < kWARP_UNITS; ++i)
    {
        tokens[i] = *reinterpret_cast<Piece const*>(a[i] + k);
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half)
    {
#pragma unroll
        for (int32_t m = 0; m < S::kTILES; ++m)
        {
            Piece const low = __ldg(reinterpret_cast<Piece const*>(b[half][m][0] + k));
            Piece const high = __ldg(reinterpret_cast<Piece const*>(b[half][m][1] + k));
#pragma unroll
            for (int32_t i = 0; i < kWARP_UNITS; ++i)
            {
                mma<T>(sums[half][m][i], low.x, high.x, low.y, high.y, tokens[i].x, tokens[i].y);
            }
            if constexpr (kSTEPS == 2)
            {
#pragma unroll
                for (int32_t i = 0; i < kWARP_UNITS; ++i)
                {
                    mma<T>(sums[half][m][i], low.z, high.z, low.w, high.w, tokens[i].z, tokens[i].w);
                }
            }
        }
    }
}

// Rotates and stores what the lane has of unit i: two tokens. `to`: the first of them, `position` its position, `d` the
// lane's first dimension.
template <typename T, int32_t D>
__device__ __forceinline__ void storeUnit(
    View const& v, Sums<D> const& sums, int32_t i, int32_t d, int32_t position, T* to)
{
    using S = Shape<D>;
#pragma unroll
    for (int32_t token = 0; token < 2; ++token)
    {
        uint32_t words[2][S::kTILES];
#pragma unroll
        for (int32_t m = 0; m < S::kTILES; ++m)
        {
            float const x0 = sums[0][m][i][token];
            float const x1 = sums[0][m][i][token + 2];
            float const y0 = sums[1][m][i][token];
            float const y1 = sums[1][m][i][token + 2];
            float4 const rope = ropePair(v, position + token, d + m * S::kSTEP); // cos, sin, cos, sin
            words[0][m] = pack<T>(x0 * rope.x - y0 * rope.y, x1 * rope.z - y1 * rope.w);
            words[1][m] = pack<T>(y0 * rope.x + x0 * rope.y, y1 * rope.z + x1 * rope.w);
        }
#pragma unroll
        for (int32_t half = 0; half < 2; ++half)
        {
            T* const at = to + token * D + half * (D / 2) + d;
            if constexpr (S::kLANE == 4)
            {
                *reinterpret_cast<uint2*>(at) = make_uint2(words[half][0], words[half][1]);
            }
            else
            {
#pragma unroll
                for (int32_t m = 0; m < S::kTILES; ++m)
                {
                    *reinterpret_cast<uint32_t*>(at + m * S::kSTEP) = words[half][m];
                }
            }
        }
    }
}

// grid: blocks of units, KV heads, batch rows.
template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS, D == 96 ? 2 : 3)
    rebuildKernel(__grid_constant__ View const v, int32_t layer, int32_t begin, int32_t blockUnits)
{
    using S = Shape<D>;
    int32_t const row = begin + static_cast<int32_t>(blockIdx.z);
    int32_t const head = static_cast<int32_t>(blockIdx.y);
    int32_t const slot = v.steps[row].slot;
    int32_t const sealedRow = v.steps[row].row.sealedRow;
    if (sealedRow < 0)
    {
        return;
    }
    int32_t const rank = v.rank;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % kWARP;
    int32_t const g = lane / 4;
    int32_t const t = lane % 4;
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / kWARP;
    int32_t const d = warp % S::kPARTS * S::kPART + g * S::kLANE;
    size_t const pair = size_t{static_cast<uint32_t>(row)} * v.kvHeads + head;
    Entry const* const entries = v.entries + pair * v.topK + v.hitCounts[pair];
    int32_t const units = v.missCounts[pair] << (v.chunkShift - 3);
    size_t const sealed = sealedHead(v, layer, sealedRow, head);
    T const* const factorB = static_cast<T const*>(v.factorB) + (sealed * D + d) * rank;
    T const* b[2][S::kTILES][2];
#pragma unroll
    for (int32_t i = 0; i < 4 * S::kTILES; ++i)
    {
        b[i % 2][i / 4][i / 2 % 2] = factorB + (i % 2 * (D / 2) + i / 4 * S::kSTEP + i / 2 % 2) * rank;
    }
    // All blocks take turns, and the warps of a block take neighbouring units: B's part of the head stays in L1.
    for (int32_t first = static_cast<int32_t>(blockIdx.x) * blockUnits; first < units;
        first += static_cast<int32_t>(gridDim.x) * blockUnits)
    {
        int32_t const last = min(first + blockUnits, units);
        for (int32_t unit = first + warp / S::kPARTS * kWARP_UNITS; unit < last; unit += S::kPASS_UNITS)
        {
            T const* a[kWARP_UNITS];
#pragma unroll
            for (int32_t i = 0; i < kWARP_UNITS; ++i)
            {
                // Past the end: the last unit again, which is not stored.
                Unit const x = unitOf(v, entries, min(unit + i, units - 1));
                size_t const page = size_t{static_cast<uint32_t>(layer)} * v.sealedPages + sealedPage(v, slot, x.chunk);
                int32_t const token = (x.chunk << v.chunkShift) % kSEALED_PAGE_TOKENS + x.token + g;
                a[i] = static_cast<T const*>(v.factorA) + (page * kSEALED_PAGE_TOKENS + token) * rank;
            }
            // All of the rows' way from memory at once: the loop over r would wait for it at every step.
#pragma unroll
            for (int32_t k = 0; k < kMAX_RANK; k += 256)
            {
                if (k + t * 64 < rank)
                {
#pragma unroll
                    for (int32_t i = 0; i < kWARP_UNITS; ++i)
                    {
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(a[i] + k + t * 64));
                    }
                }
            }
            Sums<D> sums = {};
            int32_t k = 0;
#pragma unroll 1
            for (; k + 32 <= rank; k += 32)
            {
                multiply<T, D, 2>(a, b, k + t * 8, sums);
            }
            if (k < rank)
            {
                multiply<T, D, 1>(a, b, k + t * 4, sums);
            }
#pragma unroll
            for (int32_t i = 0; i < kWARP_UNITS; ++i)
            {
                if (unit + i < units)
                {
                    Unit const x = unitOf(v, entries, unit + i);
                    int32_t const token = x.token + 2 * t;
                    size_t const key = ((sealed * v.cacheSlots + x.slot) << v.chunkShift) + token;
                    storeUnit<T, D>(
                        v, sums, i, d, (x.chunk << v.chunkShift) + token, static_cast<T*>(v.cacheKeys) + key * D);
                }
            }
        }
    }
}

} // namespace

cudaError_t rebuildKeys(View const& view, int32_t layer, int32_t begin, int32_t end, cudaStream_t stream)
{
    if (begin >= end)
    {
        return cudaSuccess;
    }
    return dispatchShape(view,
        [&](auto tag, auto headSize)
        {
            using T = decltype(tag);
            constexpr int32_t kD = decltype(headSize)::value;
            // With few pairs of row and head spread them wide. With many, half of the blocks that all chunks missing
            // would need: mostly fewer than half are missing, and a block that finds nothing to do is not free.
            bool const isWide = (end - begin) * view.kvHeads < view.multiprocessors;
            int32_t const blockUnits = isWide ? Shape<kD>::kPASS_UNITS : kBLOCK_UNITS;
            int32_t const blocks = (view.topK * view.chunkSize / kUNIT + blockUnits - 1) / blockUnits;
            dim3 const grid(isWide ? blocks : (blocks + 1) / 2, view.kvHeads, end - begin);
            rebuildKernel<T, kD><<<grid, kTHREADS, 0, stream>>>(view, layer, begin, blockUnits);
            return cudaGetLastError();
        });
}

} // namespace trtllm_shadowkv::kernels
