// Causal attention of a stretch for any device; for those of compute capability 9.0 see attend_stretch_hopper.cu.
#include "kernels/context/stretch.h"

#include "kernels/context/attend_stretch_hopper.h"
#include "kernels/context/attend_stretch_tile.cuh"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kBLOCKS = 2; // a multiprocessor: up to 255 registers a thread

// Rows past the part's are zero.
template <typename T, int32_t D>
__device__ __forceinline__ void loadQueries(View const& view, Part const& part, T const* q, uint32_t shared)
{
    constexpr int32_t kPIECES = D / 8;
#pragma unroll 4
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kROWS * kPIECES; i += kTHREADS)
    {
        int32_t const row = i / kPIECES;
        int32_t const piece = i % kPIECES;
        T const* const from = q + rowAt<D>(view, part, min(row, part.rows - 1)) + piece * 8;
        copyAsyncPart(shared + pieceAt<D>(row, piece), from, row < part.rows ? 16 : 0);
    }
}

// A thread's pieces of tiles, and of what they are copied from. As many threads copy as there are pieces in some whole
// turns of rows, so that a thread's next piece is a fixed number of bytes on.
template <typename T, int32_t D>
struct Copies
{
    static constexpr int32_t kPIECES = D / 8; // of a row of keys; a unit of values has D
    static constexpr int32_t kCOPIERS = kTHREADS / (8 * kPIECES) * (8 * kPIECES);
    static constexpr int32_t kSTEP = kCOPIERS * 16; // bytes
    static constexpr int32_t kCOUNT = kKEYS * kPIECES / kCOPIERS;
    static_assert(kCOPIERS % D == 0 && kKEYS * kPIECES % kCOPIERS == 0, "whole rows and units");

    unsigned char const* keys; // of page 0
    uint32_t pageBytes;
    uint32_t valueBytes; // from keys to values
    uint32_t toKeys;     // in shared memory, first stage
    uint32_t toValues;
    int32_t unit; // of the tile's values: the first piece's
    bool copies;

    __device__ __forceinline__ Copies(View const& view, int32_t layer, int32_t head, uint32_t firstStage)
    {
        int32_t const thread = static_cast<int32_t>(threadIdx.x);
        keys = reinterpret_cast<unsigned char const*>(liveKey<T>(view, layer, 0, head, 0)) + thread * 16;
        valueBytes = static_cast<uint32_t>(view.kvHeads * kLIVE_PAGE_TOKENS * D * 2);
        pageBytes = 2 * valueBytes;
        toKeys = firstStage + static_cast<uint32_t>(pieceAt<D>(thread / kPIECES, thread % kPIECES));
        toValues = firstStage + static_cast<uint32_t>(StretchShared<D>::kKEY_BYTES + thread * 16);
        unit = thread / D;
        copies = thread < kCOPIERS;
    }

    // The tile at position `first`, in `page`. Values of tokens from `end` on are zero: nothing may have been written
    // there, and 0 times NaN is NaN. Keys need not be: their scores are masked.
    __device__ __forceinline__ void start(int32_t page, int32_t first, int32_t end, uint32_t stage) const
    {
        if (!copies)
        {
            return;
        }
        unsigned char const* const from = keys + size_t{static_cast<uint32_t>(page)} * pageBytes
                                          + first % kLIVE_PAGE_TOKENS / kKEYS * (kKEYS * D * 2);
#pragma unroll
        for (int32_t j = 0; j < kCOUNT; ++j)
        {
            copyAsync<16>(toKeys + stage + j * kSTEP, from + j * kSTEP);
        }
        if (first + kKEYS <= end)
        {
#pragma unroll
            for (int32_t j = 0; j < kCOUNT; ++j)
            {
                copyAsync<16>(toValues + stage + j * kSTEP, from + valueBytes + j * kSTEP);
            }
            return;
        }
#pragma unroll
        for (int32_t j = 0; j < kCOUNT; ++j)
        {
            int32_t const left = end - first - (unit + j * (kCOPIERS / D)) * kUNIT;
            copyAsyncPart(toValues + stage + j * kSTEP, from + valueBytes + j * kSTEP, min(max(left, 0), kUNIT) * 2);
        }
    }
};

// Divides by the sum of weights and stores the warp's rows, through their place among the queries.
template <typename T, int32_t D>
__device__ __forceinline__ void storeRows(View const& view, Part const& part, RowSums<D> const& sums,
    unsigned char* queries, int32_t warp, int32_t lane, T* out)
{
    constexpr int32_t kPIECES = D / 8;
    int32_t const firstRow = warp * kWARP_ROWS;
    __syncwarp(); // all lanes have read their queries
#pragma unroll
    for (int32_t i = 0; i < 2; ++i)
    {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r)
        {
            float l = sums.l[i][r];
            l += __shfl_xor_sync(kFULL_WARP, l, 1);
            l += __shfl_xor_sync(kFULL_WARP, l, 2);
            float const inverse = l == 0.0F ? 0.0F : 1.0F / l;
            int32_t const row = firstRow + i * 16 + r * 8 + lane / 4;
#pragma unroll
            for (int32_t n = 0; n < kPIECES; ++n)
            {
                *reinterpret_cast<uint32_t*>(queries + pieceAt<D>(row, n) + lane % 4 * 4)
                    = pack<T>(sums.o[i][n][2 * r] * inverse, sums.o[i][n][2 * r + 1] * inverse);
            }
        }
    }
    __syncwarp();
    for (int32_t i = lane; i < kWARP_ROWS * kPIECES; i += 32)
    {
        int32_t const row = firstRow + i / kPIECES;
        int32_t const piece = i % kPIECES;
        if (row < part.rows)
        {
            *reinterpret_cast<uint4*>(out + rowAt<D>(view, part, row) + piece * 8)
                = load16(queries + pieceAt<D>(row, piece));
        }
    }
}

template <typename T, int32_t D>
__global__ void __launch_bounds__(kTHREADS, kBLOCKS) attendStretchKernel(
    __grid_constant__ View const view, int32_t layer, Stretch const stretch, T const* __restrict__ q, T* out)
{
    using Shared = StretchShared<D>;
    unsigned char* const memory = dynamicShared<unsigned char>();
    uint32_t const shared = sharedAddress(memory);
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    Part const part = partOf(view, stretch);
    int32_t const tiles = (part.end + kKEYS - 1) / kKEYS;
    LaneAddresses const at = laneAddresses<D>(shared, warp, lane);

    // Positions of rows; those that there are not are as the last one, and are not stored.
    static_assert(kROWS == kTHREADS, "one thread a row");
    int32_t* const positions = reinterpret_cast<int32_t*>(memory + Shared::kPOSITIONS);
    auto const positionOf
        = [&](int32_t row) { return stretch.start + part.first + min(row, part.rows - 1) / view.group; };
    positions[threadIdx.x] = positionOf(static_cast<int32_t>(threadIdx.x));
    int32_t const lowest = positionOf(warp * kWARP_ROWS);
    int32_t const highest
        = warp * kWARP_ROWS < part.rows ? positionOf(warp * kWARP_ROWS + kWARP_ROWS - 1) : -1; // -1: no rows

    Copies<T, D> const copies(view, layer, part.head, shared + Shared::kQUERY_BYTES);
    int32_t const* const pages = view.liveTable + size_t{static_cast<uint32_t>(stretch.slot)} * view.liveTableStride;
    auto const pageOf = [&](int32_t tile) { return pages[min(tile, tiles - 1) / (kLIVE_PAGE_TOKENS / kKEYS)]; };
    loadQueries<T, D>(view, part, q, shared);
    copies.start(pageOf(0), 0, part.end, 0);
    commitCopies();
    int32_t page = pageOf(1); // ahead of its tile

    float const scale = view.scale * kLOG2_E;
    RowSums<D> sums;
    clear(sums);
    for (int32_t tile = 0; tile < tiles; ++tile)
    {
        int32_t const first = tile * kKEYS;
        uint32_t const stage = static_cast<uint32_t>(tile % 2 * Shared::kSTAGE_BYTES);
        waitForCopies<0>();
        __syncthreads(); // the tile is there for all, and all have done with the one before
        if (tile + 1 < tiles)
        {
            copies.start(page, first + kKEYS, part.end, static_cast<uint32_t>(Shared::kSTAGE_BYTES) - stage);
            commitCopies();
            page = pageOf(tile + 2);
        }
        if (first > highest)
        {
            continue;
        }
        Scores s;
        score<T, D>(s, at, stage);
        if (first + kKEYS - 1 > lowest)
        {
            maskScores(s, positions + warp * kWARP_ROWS, first, lane);
        }
        weigh<D>(s, sums, scale);
        addValues<T, D>(sums, s, at, stage);
    }
    storeRows<T, D>(view, part, sums, memory, warp, lane, out);
}

} // namespace

cudaError_t attendStretch(
    View const& view, int32_t layer, Stretch const& stretch, void const* q, void* out, cudaStream_t stream)
{
    if (!isValid(view, layer, stretch))
    {
        return cudaErrorInvalidValue;
    }
    if (view.isHopper)
    {
        return attendStretchHopper(view, layer, stretch, q, out, stream);
    }
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            using T = decltype(tag);
            constexpr int32_t kSIZE = decltype(size)::value;
            constexpr int32_t kBYTES = StretchShared<kSIZE>::kBYTES;
            auto const kernel = attendStretchKernel<T, kSIZE>;
            return launch(kernel, partBlocks(view, stretch), kTHREADS, kBYTES, stream, view, layer, stretch,
                static_cast<T const*>(q), static_cast<T*>(out));
        });
}

} // namespace trtllm_shadowkv::kernels
