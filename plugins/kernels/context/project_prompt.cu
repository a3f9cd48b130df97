#include "kernels/context/seal.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

// A warp multiplies 16 tokens by up to kMAX_COLUMNS columns of the transposed B; its sums stay in registers over all
// heads. A slice is 16 frequencies of one head, 32 of the product's H D steps: the elements before D / 2 and their
// partners. Un-rotated keys, which are a warp's own, and rows of B, which all warps read, come through shared memory,
// kSTAGES slices in turn. Of a tensor-core product lane (g, t) takes elements 4t to 4t + 3 of rows g and g + 8 as columns
// 2t, 2t + 1, 2t + 8, 2t + 9, and rows of B lie in shared memory in that order.
namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kWARPS = 12;
constexpr int32_t kTHREADS = kWARPS * 32;
constexpr int32_t kWARP_TOKENS = 16;
constexpr int32_t kBLOCK_TOKENS = kWARPS * kWARP_TOKENS;
constexpr int32_t kSTAGES = 3;
constexpr int32_t kFREQUENCIES = 16; // of a slice
constexpr int32_t kROWS = 2 * kFREQUENCIES;
constexpr int32_t kUNIT_COLUMNS = 16;
constexpr int32_t kMAX_UNITS = 10; // of columns, in a block
constexpr int32_t kMAX_COLUMNS = kMAX_UNITS * kUNIT_COLUMNS;
constexpr int32_t kPIECE = 16;                        // bytes of a copy
constexpr int32_t kPITCH = kMAX_COLUMNS * 2 + kPIECE; // bytes of a row of B: an odd number of pieces
constexpr int32_t kPIECES = (kROWS * kMAX_COLUMNS / 8 + kTHREADS - 1) / kTHREADS; // of B, a thread and slice
constexpr int32_t kKEY_ROW = kFREQUENCIES * 2;                                    // bytes
constexpr int32_t kKEY_HALF = kWARP_TOKENS * kKEY_ROW; // the elements before D / 2; then as much of partners
constexpr int32_t kKEYS_AT = kROWS * kPITCH;           // of the first warp, from a stage's begin
constexpr int32_t kSTAGE_BYTES = kKEYS_AT + kWARPS * 2 * kKEY_HALF;
static_assert(kPITCH / kPIECE % 2 == 1 && kKEY_HALF == 32 * kPIECE && kLIVE_PAGE_TOKENS % kWARP_TOKENS == 0);

// Row of a stage where frequency f of a slice lies.
__device__ __forceinline__ int32_t rowOf(int32_t f)
{
    return f / 2 % 2 * 8 + f / 4 * 2 + f % 2;
}

// Copies of B that a thread makes for each slice: from elements after the slice's first, to bytes after the stage's.
struct Pieces
{
    uint32_t from[kPIECES];
    uint32_t to[kPIECES];
    int32_t count;
};

template <int32_t D>
__device__ __forceinline__ Pieces piecesOf(int32_t rank, int32_t units)
{
    int32_t const rowPieces = units * kUNIT_COLUMNS * 2 / kPIECE;
    Pieces pieces{};
#pragma unroll
    for (int32_t i = 0; i < kPIECES; ++i)
    {
        int32_t const index = static_cast<int32_t>(threadIdx.x) + i * kTHREADS;
        int32_t const row = index / rowPieces;
        int32_t const piece = index % rowPieces;
        int32_t const half = row / kFREQUENCIES;
        int32_t const f = row % kFREQUENCIES;
        pieces.from[i] = static_cast<uint32_t>((half * (D / 2) + f) * rank + piece * 8);
        pieces.to[i] = static_cast<uint32_t>((half * kFREQUENCIES + rowOf(f)) * kPITCH + piece * kPIECE);
        pieces.count += row < kROWS ? 1 : 0;
    }
    return pieces;
}

// Writes a row's four elements of 8 columns each, two and two in a lane, as 32 contiguous bytes.
__device__ __forceinline__ void storeUnit(uint32_t low, uint32_t high, void* target, bool isToken)
{
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const source = lane / 4 * 4 + lane % 2 * 2;
    uint2 const fromLow = make_uint2(__shfl_sync(kFULL_WARP, low, source), __shfl_sync(kFULL_WARP, low, source + 1));
    uint2 const fromHigh = make_uint2(__shfl_sync(kFULL_WARP, high, source), __shfl_sync(kFULL_WARP, high, source + 1));
    if (isToken)
    {
        *static_cast<uint2*>(target) = lane % 4 < 2 ? fromLow : fromHigh;
    }
}

// kFULL: every block has kMAX_UNITS units of columns; else blockUnits, the last ones in y what is left.
template <typename T, int32_t D, bool kFULL>
__global__ void __launch_bounds__(kTHREADS, 1)
    projectKernel(__grid_constant__ View const view, __grid_constant__ Seal const seal, int32_t blockUnits)
{
    constexpr int32_t kHALF = D / 2;
    constexpr int32_t kHEAD_SLICES = kHALF / kFREQUENCIES;
    char* const ring = dynamicShared<char>();
    uint32_t const ringAddress = sharedAddress(ring);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const warp = thread / 32;
    int32_t const lane = thread % 32;
    int32_t const g = lane / 4;
    int32_t const t = lane % 4;
    int32_t const tokens = seal.chunks * view.chunkSize;
    int32_t const layer = seal.layerBegin + static_cast<int32_t>(blockIdx.z);
    int32_t const rank = view.rank;
    int32_t const firstUnit = static_cast<int32_t>(blockIdx.y) * blockUnits;
    int32_t const units = kFULL ? kMAX_UNITS : min(blockUnits, rank / kUNIT_COLUMNS - firstUnit);
    int32_t const warpToken = static_cast<int32_t>(blockIdx.x) * kBLOCK_TOKENS + warp * kWARP_TOKENS;
    // A warp past the end multiplies the first tokens again and stores nothing. Of a warp that stands half past it the
    // second half is other tokens of the page, or nothing at all: rows do not meet, and it is not stored.
    int32_t const begin = warpToken < tokens ? warpToken : 0;

    Pieces const pieces = piecesOf<D>(rank, units);
    T const* const basis = static_cast<T const*>(view.factorB) + sealedHead(view, layer, seal.sealedRow, 0) * D * rank
                           + firstUnit * kUNIT_COLUMNS;
    // A lane copies half of the row lane / 2, of elements and of partners.
    T const* const keys
        = liveKey<T>(view, layer, promptPage(view, seal.slot, begin), 0, begin + lane / 2) + lane % 2 * (kPIECE / 2);
    uint32_t const keysAt = static_cast<uint32_t>(kKEYS_AT + warp * 2 * kKEY_HALF);
    int32_t const sliceCount = view.kvHeads * kHEAD_SLICES;
    auto const copySlice = [&](int32_t slice, int32_t stage)
    {
        uint32_t const to = ringAddress + static_cast<uint32_t>(stage * kSTAGE_BYTES);
        int32_t const head = slice / kHEAD_SLICES;
        int32_t const f = slice % kHEAD_SLICES * kFREQUENCIES;
        T const* const rows = basis + size_t{static_cast<uint32_t>(head * D + f)} * rank;
#pragma unroll
        for (int32_t i = 0; i < kPIECES; ++i)
        {
            if (i < pieces.count)
            {
                copyAsync<kPIECE>(to + pieces.to[i], rows + pieces.from[i]);
            }
        }
        T const* const key = keys + head * kLIVE_PAGE_TOKENS * D + f;
        copyAsync<kPIECE>(to + keysAt + lane * kPIECE, key);
        copyAsync<kPIECE>(to + keysAt + kKEY_HALF + lane * kPIECE, key + kHALF);
    };

    // Matrices of B: 8 rows x 8 columns, 8 rows further, then both of the next 8 columns.
    uint32_t const basisLane = static_cast<uint32_t>((lane / 8 % 2 * 8 + lane % 8) * kPITCH + lane / 16 * kPIECE);
    float sums[2 * kMAX_UNITS][4] = {};
#pragma unroll
    for (int32_t i = 0; i + 1 < kSTAGES; ++i)
    {
        if (i < sliceCount)
        {
            copySlice(i, i);
        }
        commitCopies();
    }
    int32_t stage = 0;
#pragma unroll 1
    for (int32_t slice = 0; slice < sliceCount; ++slice)
    {
        waitForCopies<kSTAGES - 2>();
        __syncthreads(); // the slice is here, and all are done with the one before
        if (slice + kSTAGES - 1 < sliceCount)
        {
            copySlice(slice + kSTAGES - 1, (stage == 0 ? kSTAGES : stage) - 1);
        }
        commitCopies();
        char const* const own = ring + stage * kSTAGE_BYTES + keysAt + g * kKEY_ROW + t * 8;
        uint32_t const matrices = ringAddress + static_cast<uint32_t>(stage * kSTAGE_BYTES) + basisLane;
#pragma unroll
        for (int32_t half = 0; half < 2; ++half)
        {
            char const* const row = own + half * kKEY_HALF;
            uint2 const upper = *reinterpret_cast<uint2 const*>(row);
            uint2 const lower = *reinterpret_cast<uint2 const*>(row + 8 * kKEY_ROW);
#pragma unroll
            for (int32_t unit = 0; unit < kMAX_UNITS; ++unit)
            {
                if (kFULL || unit < units)
                {
                    uint32_t b[4];
                    loadTransposed(b, matrices + half * kFREQUENCIES * kPITCH + unit * kUNIT_COLUMNS * 2);
                    mma<T>(sums[2 * unit], upper.x, lower.x, upper.y, lower.y, b[0], b[1]);
                    mma<T>(sums[2 * unit + 1], upper.x, lower.x, upper.y, lower.y, b[2], b[3]);
                }
            }
        }
        stage = stage + 1 == kSTAGES ? 0 : stage + 1;
    }

    // A warp's tokens share a sealed page.
    int32_t const page = sealedPage(view, seal.slot, begin >> view.chunkShift);
    T* const factor = static_cast<T*>(view.factorA)
                      + ((size_t{static_cast<uint32_t>(layer)} * view.sealedPages + page) * kSEALED_PAGE_TOKENS
                            + begin % kSEALED_PAGE_TOKENS + g)
                            * rank
                      + firstUnit * kUNIT_COLUMNS + t * 4;
#pragma unroll
    for (int32_t j = 0; j < 2; ++j)
    {
        bool const isToken = warpToken + g + j * 8 < tokens;
#pragma unroll
        for (int32_t unit = 0; unit < kMAX_UNITS; ++unit)
        {
            if (kFULL || unit < units)
            {
                float const(&low)[4] = sums[2 * unit];
                float const(&high)[4] = sums[2 * unit + 1];
                storeUnit(pack<T>(low[2 * j], low[2 * j + 1]), pack<T>(high[2 * j], high[2 * j + 1]),
                    factor + j * 8 * rank + unit * kUNIT_COLUMNS, isToken);
            }
        }
    }
}

} // namespace

cudaError_t projectPrompt(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    return dispatchShape(view,
        [&](auto tag, auto size)
        {
            using T = decltype(tag);
            constexpr int32_t kD = decltype(size)::value;
            int32_t const units = view.rank / kUNIT_COLUMNS;
            int32_t const parts = (units + kMAX_UNITS - 1) / kMAX_UNITS;
            int32_t const blockUnits = (units + parts - 1) / parts;
            auto const kernel = units % kMAX_UNITS == 0 ? projectKernel<T, kD, true> : projectKernel<T, kD, false>;
            constexpr int32_t kBYTES = kSTAGES * kSTAGE_BYTES;
            int32_t const tokens = seal.chunks * view.chunkSize;
            dim3 const grid(static_cast<uint32_t>((tokens + kBLOCK_TOKENS - 1) / kBLOCK_TOKENS),
                static_cast<uint32_t>(parts), static_cast<uint32_t>(seal.layerEnd - seal.layerBegin));
            return launch(kernel, grid, kTHREADS, kBYTES, stream, view, seal, blockUnits);
        });
}

} // namespace trtllm_shadowkv::kernels
