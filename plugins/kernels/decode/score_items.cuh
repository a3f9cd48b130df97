// The work items of scoreLandmarks: where they are, and their way into shared memory.
#pragma once

#include "kernels/decode/device.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kWARP = 32;
constexpr int32_t kMMA_ROWS = 16;  // chunks of one tensor-core tile
constexpr int32_t kMMA_DEPTH = 16; // elements of one step along D
constexpr int32_t kMMA_HEADS = 8;
constexpr int32_t kTILES = kSCORE_CHUNKS / kMMA_ROWS; // of a work item

// A work item is 32 chunks of one KV head of one batch row. Items are numbered by row, head and place in the row, which
// is also the order of View::logits and View::logitSums.
struct Place
{
    int32_t row; // batch row
    int32_t head;
    int32_t chunk; // first one
    int32_t slot;  // of the row
    int32_t published;
};

// How lane (g, t) takes the landmarks of a 16-chunk tile, rows g and g + 8. Of a row it takes pieces t, t + 4, ...;
// four neighbouring elements, wherever they lie, are columns 2t, 2t+1, 2t+8, 2t+9 of one step.
template <typename L, int32_t D>
struct Shape
{
    static constexpr bool kE4M3 = sizeof(L) == 1;
    static constexpr int32_t kROW_BYTES = D * static_cast<int32_t>(sizeof(L));
    static constexpr int32_t kPIECE_BYTES = kROW_BYTES % 64 == 0 ? 16 : 8;
    static constexpr int32_t kPIECE = kPIECE_BYTES / static_cast<int32_t>(sizeof(L)); // elements
    static constexpr int32_t kPIECES = kROW_BYTES / (4 * kPIECE_BYTES);               // of a row, a lane
    static constexpr int32_t kSTEPS = D / kMMA_DEPTH;
    static constexpr int32_t kTILE_BYTES = kMMA_ROWS * kROW_BYTES;
    // Items that a warp has under way: 16 warps then have 64 to 128 KB, more than the memory needs to run at full
    // speed.
    static constexpr int32_t kAHEAD = kROW_BYTES > 128 ? 1 : 2;
    static constexpr int32_t kITEM_BYTES = kTILES * kTILE_BYTES + kWARP * 16; // landmarks and Meta
    static constexpr int32_t kRING_BYTES = kAHEAD * kITEM_BYTES;              // of a warp
};

// What a lane needs of an item besides landmarks.
struct alignas(16) Meta
{
    float scale;       // e4m3: of chunk `lane`
    uint32_t excluded; // bit map of the outliers
    int32_t published; // chunks from the item's first one on that may be selected, at least 1
    int32_t queries;   // row * kvHeads + head
};

// --- where -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void enterRow(View const& v, Place& place, int32_t row)
{
    StepRow const& step = v.steps[row];
    place.row = row;
    place.slot = step.slot;
    place.published = step.row.published;
}

// Place of item n of the rows from `begin` on. Rows without items share scoreBegin with the next row, so that the last
// row that does not start behind n is the one. The lanes look at all rows at once: a search would wait for every step.
__device__ __forceinline__ Place findPlace(View const& v, int32_t begin, int32_t end, int64_t n)
{
    int32_t const first = v.steps[begin].scoreBegin;
    uint32_t count = 0; // rows that do not start behind n
    for (int32_t row = begin + static_cast<int32_t>(threadIdx.x) % kWARP; row < end; row += kWARP)
    {
        count += int64_t{v.steps[row].scoreBegin - first} * v.kvHeads <= n ? 1U : 0U;
    }
    int32_t const found = begin + static_cast<int32_t>(__reduce_add_sync(kFULL_WARP, count)) - 1;
    Place place;
    enterRow(v, place, found);
    int32_t const rest = static_cast<int32_t>(n - int64_t{v.steps[found].scoreBegin - first} * v.kvHeads);
    int32_t const items = v.steps[found].scoreItems;
    place.head = rest / items;
    place.chunk = (rest - place.head * items) * kSCORE_CHUNKS;
    return place;
}

// To the next item, which must exist.
__device__ __forceinline__ void advance(View const& v, Place& place)
{
    place.chunk += kSCORE_CHUNKS;
    if (place.chunk < place.published)
    {
        return;
    }
    place.chunk = 0;
    if (++place.head < v.kvHeads)
    {
        return;
    }
    place.head = 0;
    int32_t row = place.row + 1;
    while (v.steps[row].scoreItems == 0)
    {
        ++row;
    }
    enterRow(v, place, row);
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Landmarks travel through shared memory because loads into registers do not stay in flight: the compiler moves them
// down to their use. A lane copies the pieces that it reads itself, so no barrier is needed.
// The lane's Meta of an item in the ring.
template <typename L, int32_t D>
__device__ __forceinline__ Meta* metaOf(uint8_t* ring)
{
    return reinterpret_cast<Meta*>(ring + kTILES * Shape<L, D>::kTILE_BYTES) + threadIdx.x % kWARP;
}

// Starts the copy of the lane's pieces of a tile, [2 rows, kPIECES], kWARP apart; `index` is that of the item's first
// chunk. Chunks past the published ones hold anything and are dropped later: a landmark reaches only its own row.
template <typename L, int32_t D>
__device__ __forceinline__ void copyTile(View const& v, size_t index, int32_t tile, uint8_t* ring)
{
    using S = Shape<L, D>;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % kWARP;
    uint32_t const to = sharedAddress(ring) + tile * S::kTILE_BYTES + lane * S::kPIECE_BYTES;
    uint8_t const* const from = static_cast<uint8_t const*>(v.landmarks) + index * S::kROW_BYTES
                                + (lane / 4 * S::kROW_BYTES + lane % 4 * S::kPIECE_BYTES);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half)
    {
#pragma unroll
        for (int32_t i = 0; i < S::kPIECES; ++i)
        {
            copyAsync<S::kPIECE_BYTES>(to + (half * S::kPIECES + i) * kWARP * S::kPIECE_BYTES,
                from + (tile * kMMA_ROWS + half * 8) * S::kROW_BYTES + i * 4 * S::kPIECE_BYTES, evictFirst());
        }
    }
}

// Starts the copies of Meta and of the first tile of an item, which lies in one page; returns the index of its first
// chunk.
template <typename L, int32_t D>
__device__ __forceinline__ size_t copyFirst(View const& v, int32_t layer, Place const& place, uint8_t* ring)
{
    using S = Shape<L, D>;
    int32_t const page = sealedPage(v, place.slot, place.chunk);
    size_t const index = pagedChunk(v, layer, page, place.head, place.chunk);
    Meta* const meta = metaOf<L, D>(ring);
    if constexpr (S::kE4M3)
    {
        copyAsync<4>(sharedAddress(&meta->scale), v.landmarkScales + index + threadIdx.x % kWARP);
    }
    copyAsync<4>(sharedAddress(&meta->excluded), v.excluded + index / kSCORE_CHUNKS);
    meta->published = place.published - place.chunk;
    meta->queries = place.row * v.kvHeads + place.head;
    copyTile<L, D>(v, index, 0, ring);
    return index;
}

} // namespace
} // namespace trtllm_shadowkv::kernels
