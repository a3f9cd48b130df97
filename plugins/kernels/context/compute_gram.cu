#include "kernels/context/seal.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

// A block multiplies the un-rotated keys of two heads, over all sealed tokens in order: D x D sums of the Gram matrix
// and, mirrored, as many more. Keys come through shared memory, kSTAGES tiles of kTOKENS tokens in turn. Blocks of a layer
// stand next to each other in the grid and read the same tokens at about the same time, most of them from L2.
//
// Keys are scaled by a power of two, so that neither their products nor sums of these overflow or vanish in float32: those
// of bfloat16, which has float32's range, on their way into a product; of float16 all products fit, and the sums are
// scaled twice.
namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr uint32_t kTOKENS = 32;                 // of a tile
constexpr uint32_t kSTAGES = 4;                  // tiles in shared memory
constexpr uint32_t kCOPIES = 2;                  // of a tile and head, a thread
constexpr uint32_t kAPART = kTOKENS / kCOPIES;   // tokens from one to the next
constexpr uint32_t kCOLUMNS = 32;                // of a warp; it has half of the rows
constexpr uint32_t kCOLUMN_TILES = kCOLUMNS / 8; // of a tensor-core product
constexpr uint32_t kRUN = 256;                   // tiles that are summed by tensor cores, which round towards zero
constexpr uint32_t kNOT_FINITE = 255;            // exponent of float32
constexpr uint32_t kMAX_EXPONENT = 253;          // of which the scale is not subnormal
constexpr uint32_t kEXPONENT_SHIFT = 23;
static_assert(kLIVE_PAGE_TOKENS % kTOKENS == 0);

// The power of two that brings `largest` into [1, 2), as far as float32 has it: [2, 4) at the upper end, less than 1
// where it is subnormal. 1 where it is not finite.
__device__ __forceinline__ float scaleOf(uint32_t largest)
{
    uint32_t const exponent = largest >> kEXPONENT_SHIFT;
    return exponent >= kNOT_FINITE
               ? 1.0F
               : __uint_as_float((kMAX_EXPONENT + 1 - min(max(exponent, 1U), kMAX_EXPONENT)) << kEXPONENT_SHIFT);
}

// Bytes from a token of a tile to the next: an odd number of 16 bytes, so that a matrix's rows differ in banks.
template <int32_t D>
constexpr uint32_t kPITCH = D * 2 + 16;

// Two keys on their way into a product.
template <typename T>
__device__ __forceinline__ uint32_t scaled(uint32_t keys, float scale)
{
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
    {
        __nv_bfloat162 const product
            = __hmul2(*reinterpret_cast<__nv_bfloat162 const*>(&keys), __float2bfloat162_rn(scale));
        keys = *reinterpret_cast<uint32_t const*>(&product);
    }
    return keys;
}

// Adds a run's sums, scaled twice, to what is in memory, or begins with them. `mirror` null: no other triangle to write
// yet.
template <uint32_t kROW_TILES>
__device__ __forceinline__ void addRun(
    float (&sums)[kROW_TILES][kCOLUMN_TILES][4], float scale, float* gram, float* mirror, size_t width, bool begins)
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
                float2 const sum = make_float2(before[b].x + sums[a][b][2 * j] * scale * scale,
                    before[b].y + sums[a][b][2 * j + 1] * scale * scale);
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
    constexpr uint32_t kROW_TILES = kHALF / 16;
    constexpr bool kIS_SUM_SCALED = std::is_same_v<T, __half>;
    constexpr uint32_t kHEAD = kTOKENS * kPITCH<D>; // bytes of a tile
    constexpr uint32_t kSTAGE = 2 * kHEAD;
    constexpr uint32_t kPAGE_TILES = kLIVE_PAGE_TOKENS / kTOKENS;
    constexpr uint32_t kPAGES = 32; // whose ids are looked up at once

    uint32_t const thread = threadIdx.x;
    uint32_t const lane = thread % 32;
    uint32_t const tokens = static_cast<uint32_t>(seal.chunks) << view.chunkShift;
    uint32_t const tileCount = (tokens + kTOKENS - 1) / kTOKENS;
    int32_t const index = static_cast<int32_t>(blockIdx.z);
    uint32_t const largest = *scratchOf<uint32_t const>(seal, layout, index, layout.largest);
    int32_t left = 0; // heads of the pair: left <= right
    int32_t right = static_cast<int32_t>(blockIdx.x);
    for (; right >= view.kvHeads - left; ++left)
    {
        right -= view.kvHeads - left;
    }
    right += left;
    bool const isPair = left != right;
    float const scale = scaleOf(largest);

    // A thread copies 16 bytes of tokens `token` and kAPART further.
    uint32_t const piece = thread % (D / 8);
    uint32_t const token = thread / (D / 8);
    T const* const keys = liveKey<T>(view, seal.layerBegin + index, 0, left, static_cast<int32_t>(token)) + piece * 8;
    uint32_t const apart = static_cast<uint32_t>((right - left) * kLIVE_PAGE_TOKENS * D);
    // At most 2^20.
    uint32_t const pageElements = static_cast<uint32_t>(livePageElements(view));
    uint32_t pages = 0; // ids of kPAGES pages, a lane each
    uint32_t const ring = sharedAddress(dynamicShared<char>());
    uint32_t const copyTo = ring + token * kPITCH<D> + piece * 16;
    auto const copyTile = [&](uint32_t tile)
    {
        uint32_t const pageIndex = tile / kPAGE_TILES;
        if (tile % (kPAGES * kPAGE_TILES) == 0)
        {
            uint32_t const p = min((pageIndex + lane) * kLIVE_PAGE_TOKENS, tokens - 1);
            pages = static_cast<uint32_t>(promptPage(view, seal.slot, static_cast<int32_t>(p)));
        }
        uint32_t const page = __shfl_sync(kFULL_WARP, pages, pageIndex % kPAGES);
        T const* const tileKeys = keys + size_t{page} * pageElements + tile % kPAGE_TILES * kTOKENS * D;
        uint32_t const to = copyTo + tile % kSTAGES * kSTAGE;
#pragma unroll
        for (uint32_t j = 0; j < kCOPIES; ++j)
        {
            // Zero past the end.
            int32_t const bytes = tile * kTOKENS + token + j * kAPART < tokens ? 16 : 0;
            T const* const key = tileKeys + j * kAPART * D;
            copyAsyncPart(to + j * kAPART * kPITCH<D>, key, bytes);
            if (isPair)
            {
                copyAsyncPart(to + kHEAD + j * kAPART * kPITCH<D>, key + apart, bytes);
            }
        }
    };

    // Both operands are read across: of a matrix the rows are tokens. Matrices of the left one: 8 tokens x 16
    // dimensions, then 8 tokens further; of the right one 16 tokens x 8 dimensions, then 8 dimensions further.
    uint32_t const warpRow = thread / 32 % 2 * kHALF;
    uint32_t const warpColumn = thread / 64 * kCOLUMNS;
    uint32_t const leftAddress = ring + (lane / 16 * 8 + lane % 8) * kPITCH<D> + (warpRow + lane / 8 % 2 * 8) * 2;
    uint32_t const rightAddress
        = ring + (isPair ? kHEAD : 0) + (lane / 8 % 2 * 8 + lane % 8) * kPITCH<D> + (warpColumn + lane / 16 * 8) * 2;
    float sums[kROW_TILES][kCOLUMN_TILES][4] = {};
    auto const scaleAll = [&](uint32_t (&pairs)[4])
    {
#pragma unroll
        for (uint32_t& pair : pairs)
        {
            pair = scaled<T>(pair, scale);
        }
    };
    auto const multiply = [&](uint32_t tile)
    {
#pragma unroll
        for (uint32_t k = 0; k < kTOKENS; k += 16)
        {
            uint32_t const at = tile % kSTAGES * kSTAGE + k * kPITCH<D>;
            uint32_t b[kCOLUMN_TILES / 2][4];
#pragma unroll
            for (uint32_t j = 0; j < kCOLUMN_TILES / 2; ++j)
            {
                loadTransposed(b[j], rightAddress + at + j * 32);
                scaleAll(b[j]);
            }
#pragma unroll
            for (uint32_t i = 0; i < kROW_TILES; ++i)
            {
                uint32_t a[4];
                loadTransposed(a, leftAddress + at + i * 32);
                scaleAll(a);
#pragma unroll
                for (uint32_t j = 0; j < kCOLUMN_TILES; ++j)
                {
                    mma<T>(sums[i][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    };

#pragma unroll
    for (uint32_t tile = 0; tile + 1 < kSTAGES; ++tile)
    {
        if (tile < tileCount)
        {
            copyTile(tile);
        }
        commitCopies();
    }
    for (uint32_t tile = 0; tile < tileCount; ++tile)
    {
        waitForCopies<kSTAGES - 2>();
        __syncthreads(); // the tile is there, and all are done with the one before
        if (tile + kSTAGES - 1 < tileCount)
        {
            copyTile(tile + kSTAGES - 1);
        }
        commitCopies();
        multiply(tile);
        bool const isLast = tile + 1 == tileCount;
        if ((tile + 1) % kRUN == 0 || isLast)
        {
            size_t const width = static_cast<size_t>(view.kvHeads) * D;
            size_t const row = static_cast<uint32_t>(left) * D + warpRow + lane / 4;
            size_t const column = static_cast<uint32_t>(right) * D + warpColumn + lane % 4 * 2;
            float* const gram = scratchOf<float>(seal, layout, index, layout.gram);
            float* const mirror = isLast && isPair ? gram + column * width + row : nullptr;
            addRun(sums, kIS_SUM_SCALED ? scale : 1.0F, gram + row * width + column, mirror, width, tile < kRUN);
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
            constexpr int32_t kBYTES = kSTAGES * 2 * kTOKENS * kPITCH<kD>;
            dim3 const grid(static_cast<uint32_t>(view.kvHeads * (view.kvHeads + 1) / 2), 1,
                static_cast<uint32_t>(seal.layerEnd - seal.layerBegin));
            return launch(
                gramKernel<decltype(tag), kD>, grid, 2 * kD, kBYTES, stream, view, seal, sealLayout(view, seal.chunks));
        });
}

} // namespace trtllm_shadowkv::kernels
