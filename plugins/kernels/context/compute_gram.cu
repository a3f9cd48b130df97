#include "kernels/context/seal.cuh"
#include "kernels/context/unrotated.cuh"
#include "kernels/launch.cuh"

// A block multiplies the keys of two heads, over all sealed tokens in order: D x D sums of the Gram matrix and,
// mirrored, as many more. Keys come through registers, where they are un-rotated, into shared memory, a tile of kTOKENS
// tokens at a time; the next tile is un-rotated and the one after it loaded while the tensor cores multiply. Blocks of
// a layer stand next to each other in the grid and read the same tokens at about the same time, most of them from L2.
namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr uint32_t kTOKENS = 32;                 // of a tile
constexpr uint32_t kITEMS = 2;                   // of a tile and head that a thread un-rotates
constexpr uint32_t kAPART = kTOKENS / kITEMS;    // tokens from one to the next: whole units, so of the same step
constexpr uint32_t kCOLUMNS = 32;                // of a warp; it has half of the rows
constexpr uint32_t kCOLUMN_TILES = kCOLUMNS / 8; // of a tensor-core product
constexpr uint32_t kRUN = 256;                   // tiles that are summed by tensor cores, which round towards zero
constexpr uint32_t kNOT_FINITE = 255;            // exponent of float32
constexpr uint32_t kMAX_EXPONENT = 253;          // of which the scale is not subnormal
constexpr uint32_t kEXPONENT_SHIFT = 23;
static_assert(kAPART % kUNIT == 0 && kLIVE_PAGE_TOKENS % kTOKENS == 0);

// The power of two that brings `largest` into [1, 2), as far as float32 has it: [2, 4) at the upper end, less than 1
// where it is subnormal. 1 where it is not finite.
__device__ __forceinline__ float scaleOf(uint32_t largest)
{
    uint32_t const exponent = largest >> kEXPONENT_SHIFT;
    return exponent >= kNOT_FINITE
               ? 1.0F
               : __uint_as_float((kMAX_EXPONENT + 1 - min(max(exponent, 1U), kMAX_EXPONENT)) << kEXPONENT_SHIFT);
}

// Adds a run's sums to what is in memory, or begins with them. `mirror` null: no other triangle to write yet.
template <uint32_t kROW_TILES>
__device__ __forceinline__ void addRun(
    float (&sums)[kROW_TILES][kCOLUMN_TILES][4], float* gram, float* mirror, size_t width, bool begins)
{
#pragma unroll
    for (uint32_t a = 0; a < kROW_TILES; ++a)
    {
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j)
        {
            float* const row = gram + (a * 16 + j * 8) * width;
            float2 before[kCOLUMN_TILES];
#pragma unroll
            for (uint32_t b = 0; b < kCOLUMN_TILES; ++b)
            {
                before[b] = begins ? make_float2(0.0F, 0.0F) : *reinterpret_cast<float2 const*>(row + b * 8);
            }
#pragma unroll
            for (uint32_t b = 0; b < kCOLUMN_TILES; ++b)
            {
                float2 const sum = make_float2(before[b].x + sums[a][b][2 * j], before[b].y + sums[a][b][2 * j + 1]);
                *reinterpret_cast<float2*>(row + b * 8) = sum;
                if (mirror != nullptr)
                {
                    float* const column = mirror + b * 8 * width + a * 16 + j * 8;
                    column[0] = sum.x;
                    column[width] = sum.y;
                }
                sums[a][b][2 * j] = 0.0F;
                sums[a][b][2 * j + 1] = 0.0F;
            }
        }
    }
}

template <typename T, int32_t D>
__global__ void __launch_bounds__(2 * D, 256 / D) gramKernel(
    __grid_constant__ View const view, __grid_constant__ Seal const seal, __grid_constant__ SealLayout const layout)
{
    constexpr uint32_t kHALF = D / 2;
    constexpr uint32_t kPITCH = D + 8; // elements: an odd number of 16 bytes, so that a matrix's rows differ in banks
    constexpr uint32_t kROW_TILES = kHALF / 16;
    __shared__ __align__(16) uint16_t tiles[2][2][kTOKENS][kPITCH]; // buffer, head
    __shared__ __align__(16) float turns[2][kTOKENS / kUNIT][D];
    constexpr uint32_t kBUFFER = sizeof(tiles) / 2; // bytes
    constexpr uint32_t kTURNS = sizeof(turns) / 2;
    constexpr uint32_t kPAGE_TILES = kLIVE_PAGE_TOKENS / kTOKENS;
    constexpr uint32_t kPAGES = 32; // whose ids are looked up at once

    uint32_t const thread = threadIdx.x;
    uint32_t const lane = thread % 32;
    uint32_t const tokens = static_cast<uint32_t>(seal.chunks) << view.chunkShift;
    uint32_t const tileCount = (tokens + kTOKENS - 1) / kTOKENS;
    int32_t const index = static_cast<int32_t>(blockIdx.z);
    uint32_t const largest = *scratchOf<uint32_t const>(seal, layout, index, layout.largest);
    if (blockIdx.x == 0 && thread == 0 && largest >> kEXPONENT_SHIFT >= kNOT_FINITE)
    {
        atomicOr(view.fault, kFAULT_KEYS);
    }
    int32_t left = 0; // heads of the pair: left <= right
    int32_t right = static_cast<int32_t>(blockIdx.x);
    for (; right >= view.kvHeads - left; ++left)
    {
        right -= view.kvHeads - left;
    }
    right += left;
    bool const isPair = left != right;

    // The thread's items: from element `first` on, of tokens `token` and kAPART further.
    uint32_t const first = thread % (D / 8) * 4;
    uint32_t const token = thread / (D / 8);
    float4 steps[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
    {
        float4 const step = *reinterpret_cast<float4 const*>(view.ropeSteps + token % kUNIT * D + (first + i * 2) * 2);
        float const scale = scaleOf(largest);
        steps[i] = make_float4(step.x * scale, step.y * scale, step.z * scale, step.w * scale);
    }
    T const* const keys = liveKey<T>(view, seal.layerBegin + index, 0, left, static_cast<int32_t>(token)) + first;
    uint32_t const apart = static_cast<uint32_t>((right - left) * kLIVE_PAGE_TOKENS * D);
    // At most 2^20.
    uint32_t const pageElements = static_cast<uint32_t>(livePageElements(view));
    uint32_t pages = 0; // ids of kPAGES pages, a lane each
    // Its part of a tile's turns: 16 bytes, D / 4 times those of each of 4 units.
    bool const copies = thread < D;
    uint32_t const turnUnit = thread / (D / 4);
    float const* const turnsFrom = view.ropeTurns + thread % (D / 4) * 4;
    uint32_t const turnsTo = sharedAddress(turns) + thread * 16;
    Item items[2][kITEMS]; // head
    auto const load = [&](uint32_t tile)
    {
        uint32_t const pageIndex = tile / kPAGE_TILES;
        if (tile % (kPAGES * kPAGE_TILES) == 0)
        {
            uint32_t const p = min((pageIndex + lane) * kLIVE_PAGE_TOKENS, tokens - 1);
            pages = static_cast<uint32_t>(promptPage(view, seal.slot, static_cast<int32_t>(p)));
        }
        uint32_t const page = __shfl_sync(kFULL_WARP, pages, pageIndex % kPAGES);
        T const* const tileKeys = keys + size_t{page} * pageElements + tile % kPAGE_TILES * kTOKENS * D;
#pragma unroll
        for (uint32_t j = 0; j < kITEMS; ++j)
        {
            bool const isToken = tile * kTOKENS + token + j * kAPART < tokens;
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h)
            {
                items[h][j] = {make_uint2(0, 0), make_uint2(0, 0)};
                if (isToken && (h == 0 || isPair))
                {
                    T const* const key = tileKeys + (h == 0 ? 0 : apart) + j * kAPART * D;
                    items[h][j] = {*reinterpret_cast<uint2 const*>(key), *reinterpret_cast<uint2 const*>(key + kHALF)};
                }
            }
        }
        if (copies)
        {
            // Past the end the last unit's: rows there are zero, which no NaN may meet.
            uint32_t const unit = min(tile * (kTOKENS / kUNIT) + turnUnit, tokens / kUNIT - 1);
            copyAsync<16>(turnsTo + tile % 2 * kTURNS, turnsFrom + size_t{unit} * D);
        }
        commitCopies();
    };
    char* const storeTo = reinterpret_cast<char*>(tiles) + (token * kPITCH + first) * 2;
    char const* const turnsAt = reinterpret_cast<char const*>(turns) + (token / kUNIT * D + first * 2) * 4;
    auto const store = [&](uint32_t tile)
    {
#pragma unroll
        for (uint32_t j = 0; j < kITEMS; ++j)
        {
            float4 const* const turn
                = reinterpret_cast<float4 const*>(turnsAt + tile % 2 * kTURNS + j * (kAPART / kUNIT) * D * 4);
            float4 const low = compose(turn[0], steps[0]);
            float4 const high = compose(turn[1], steps[1]);
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h)
            {
                if (h == 0 || isPair)
                {
                    Item const item = unrotate<T>(items[h][j], low, high);
                    char* const target = storeTo + tile % 2 * kBUFFER + (h * kTOKENS + j * kAPART) * kPITCH * 2;
                    *reinterpret_cast<uint2*>(target) = item.own;
                    *reinterpret_cast<uint2*>(target + kHALF * 2) = item.partner;
                }
            }
        }
    };

    // Both operands are read across: of a matrix the rows are tokens. Matrices of the left one: 8 tokens x 16
    // dimensions, then 8 tokens further; of the right one 16 tokens x 8 dimensions, then 8 dimensions further.
    uint32_t const warpRow = thread / 32 % 2 * kHALF;
    uint32_t const warpColumn = thread / 64 * kCOLUMNS;
    uint32_t const leftAddress
        = sharedAddress(tiles) + ((lane / 16 * 8 + lane % 8) * kPITCH + warpRow + lane / 8 % 2 * 8) * 2;
    uint32_t const rightAddress
        = sharedAddress(tiles)
          + (((isPair ? kTOKENS : 0) + lane / 8 % 2 * 8 + lane % 8) * kPITCH + warpColumn + lane / 16 * 8) * 2;
    float sums[kROW_TILES][kCOLUMN_TILES][4] = {};
    auto const multiply = [&](uint32_t tile)
    {
#pragma unroll
        for (uint32_t k = 0; k < kTOKENS; k += 16)
        {
            uint32_t const at = tile % 2 * kBUFFER + k * kPITCH * 2;
            uint32_t b[kCOLUMN_TILES / 2][4];
#pragma unroll
            for (uint32_t j = 0; j < kCOLUMN_TILES / 2; ++j)
            {
                loadTransposed(b[j], rightAddress + at + j * 32);
            }
#pragma unroll
            for (uint32_t i = 0; i < kROW_TILES; ++i)
            {
                uint32_t a[4];
                loadTransposed(a, leftAddress + at + i * 32);
#pragma unroll
                for (uint32_t j = 0; j < kCOLUMN_TILES; ++j)
                {
                    mma<T>(sums[i][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    };

    load(0);
    waitForCopies<0>();
    __syncthreads();
    store(0);
    if (tileCount > 1)
    {
        load(1);
    }
    for (uint32_t tile = 0; tile < tileCount; ++tile)
    {
        waitForCopies<0>();
        __syncthreads(); // this tile and the next one's turns are there, and all are done with the tile before
        if (tile + 1 < tileCount)
        {
            store(tile + 1);
        }
        if (tile + 2 < tileCount)
        {
            load(tile + 2);
        }
        multiply(tile);
        bool const isLast = tile + 1 == tileCount;
        if ((tile + 1) % kRUN == 0 || isLast)
        {
            size_t const width = static_cast<size_t>(view.kvHeads) * D;
            size_t const row = static_cast<uint32_t>(left) * D + warpRow + lane / 4;
            size_t const column = static_cast<uint32_t>(right) * D + warpColumn + lane % 4 * 2;
            float* const gram = scratchOf<float>(seal, layout, index, layout.gram);
            float* const mirror = isLast && isPair ? gram + column * width + row : nullptr;
            addRun(sums, gram + row * width + column, mirror, width, tile < kRUN);
        }
    }
}

} // namespace

cudaError_t computeGram(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size)
        {
            constexpr int32_t kD = decltype(size)::value;
            dim3 const grid(static_cast<uint32_t>(view.kvHeads * (view.kvHeads + 1) / 2), 1,
                static_cast<uint32_t>(seal.layerEnd - seal.layerBegin));
            return launch(
                gramKernel<decltype(tag), kD>, grid, 2 * kD, 0, stream, view, seal, sealLayout(view, seal.chunks));
        });
}

} // namespace trtllm_shadowkv::kernels
