// The device memory of a state as kernels see it: sizes, and where everything lies.
//
// Tokens are handled in units of 8, the rows of a tensor-core tile; a chunk of C tokens is C / 8 units, and position =
// index. Everything that changes from step to step lies in device memory and is read there, so that a captured graph
// stays valid while rows grow, enter and leave.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trtllm_shadowkv::kernels
{

inline constexpr int32_t kUNIT = 8;                 // tokens
inline constexpr int32_t kLIVE_PAGE_TOKENS = 128;   // tokens that share one page of live keys and values
inline constexpr int32_t kSEALED_PAGE_TOKENS = 512; // tokens that share one page of A, landmarks and scales
inline constexpr int32_t kSCORE_CHUNKS = 32;        // chunks that one warp scores: one word of the outlier bit map
inline constexpr int32_t kSPLIT_TOKENS = 256;       // tokens of one partial attention (live tokens: or a multiple)
inline constexpr int32_t kMAX_LIVE_SPLITS = 128;    // partial attentions over the live tokens of a row and head

inline constexpr int32_t kMAX_GROUP_HEADS = 16; // query heads a KV head
inline constexpr int32_t kMAX_KV_HEADS = 32;
inline constexpr int32_t kMAX_RANK = 512;
inline constexpr int32_t kMAX_TOP_K = 2048;
inline constexpr int32_t kMAX_CACHE_SLOTS = 8192;
inline constexpr int32_t kMAX_OUTLIERS = 1024;
inline constexpr int32_t kMAX_BATCH = 1024;
inline constexpr int32_t kMAX_TOKENS = 1 << 21; // of one row
inline constexpr int32_t kMAX_ROW_GROUPS = 8;

enum class Element : int32_t
{
    kF16 = 0,
    kBF16 = 1
};

// How landmarks, or values of sealed chunks, are kept: as Element, or as e4m3 with a float32 scale a chunk and head
// (amax / 448, 1 where amax is 0).
enum class Format : int32_t
{
    kELEMENT = 0,
    kE4M3 = 1
};

// One sequence; lives in device memory, indexed by slot. Written between steps by the state, in a step by the prologue.
struct Row
{
    int32_t length;      // tokens, the current one included
    int32_t published;   // sealed chunks that may be selected; 0 for a dense row
    int32_t sealing;     // chunk that is sealed in this step, -1: none
    int32_t sealedRow;   // index into what only sealed rows have; -1: a dense row
    int32_t topK;        // chunks to select a KV head, 1 to View::topK
    int32_t outliers;    // outlier chunks of each KV head, 0 to View::outliers
    int32_t ring;        // entries of its table of live pages: page of token p is entry (p / 128) % ring
    int32_t valueStride; // chunks from one KV head's values to the next one's in its value region
};

// What the kernels of one step know of batch row b: the Row, and where its work lies. Written by the prologue.
struct StepRow
{
    int32_t slot; // -1: padding row, all else zero (sealing and sealedRow -1)
    Row row;
    int32_t scoreItems;  // ceil(published / kSCORE_CHUNKS)
    int32_t scoreBegin;  // sum of scoreItems of the batch rows before b
    int32_t liveTokens;  // tokens in live pages that are attended: length - published * C
    int32_t splitTokens; // tokens of one of its live splits: kSPLIT_TOKENS times a power of two
    int32_t
        liveSplits; // liveTokens / splitTokens, rounded, at least 1 where there are any; at most kMAX_LIVE_SPLITS. The
                    // last one takes what is left
    int32_t liveBegin; // sum of liveSplits of the batch rows before b
};

// A selected chunk and its slot in the chunk cache.
struct Entry
{
    int32_t chunk;
    int32_t slot;
};

// Counters of a slot, over all layers and KV heads since it was allocated. Sums of integers, so their order is no matter.
struct Counters
{
    unsigned long long hits;
    unsigned long long misses;
};

// ||K - A B||^2 and ||K||^2 of the chunks sealed by projection in one layer.
struct Residual
{
    float lost;
    float total;
};

// Sticky, in View::fault: what a kernel found wrong with its input.
enum Fault : uint32_t
{
    kFAULT_POSITION = 1U, // position_ids differs from the row's length - 1
    kFAULT_SLOT = 2U,     // a slot out of range
    kFAULT_KEYS = 4U      // keys of a row being sealed are not finite
};

// Passed to kernels by value. T is the 2-byte type of `element`. Index order is from slowest to fastest; every array
// starts at a multiple of 256 bytes.
struct View
{
    // Shape
    Element element;
    Format landmarkFormat;
    Format valueFormat;
    int32_t layers;
    int32_t heads;      // Hq
    int32_t kvHeads;    // H
    int32_t group;      // G = Hq / H, 1 to kMAX_GROUP_HEADS
    int32_t headSize;   // D: 64, 96 or 128
    int32_t chunkSize;  // C: 8 or 16
    int32_t chunkShift; // log2(C)
    int32_t rank;       // r: multiple of 16
    int32_t topK;
    int32_t outliers;
    int32_t window;     // W, multiple of C
    int32_t cacheSlots; // of one KV head
    // Capacity
    int32_t slots;
    int32_t sealedRows;
    int32_t maxBatch;
    int32_t livePages;
    int32_t sealedPages;
    int32_t liveTableStride;   // entries of a slot's table of live pages
    int32_t sealedTableStride; // and of sealed pages
    int32_t multiprocessors;
    bool startsEarly; // the device can start a kernel before the one before has ended
    bool isHopper;    // it is of compute capability 9.0, and the library has code for 9.0a
    float scale;      // of scores: 1 / sqrt(D)

    // Rows
    Row* rows;            // [slots]
    int32_t* liveTable;   // [slots, liveTableStride] page ids
    int32_t* sealedTable; // [slots, sealedTableStride] page ids; page of chunk c: entry c * C / 512
    uint64_t*
        valueRegion; // [slots, layers] device address of a layer's values: [H, valueStride] chunks, pinned host or GPU
    Counters* counters;  // [slots]
    Residual* residuals; // [slots, layers]
    uint32_t* fault;     // [1]

    // Live pages, [layers, livePages], each K [H, 128, D] T post-RoPE, then V [H, 16 units, D, 8 tokens] T
    void* live;
    // Sealed pages
    void* factorA;         // [layers, sealedPages, 512, r] T
    void* landmarks;       // [layers, sealedPages, H, 512 / C, D] landmarkFormat; e4m3: minus the head's centre
    float* landmarkScales; // [layers, sealedPages, H, 512 / C]; null unless e4m3
    float* valueScales;    // the same for values
    uint32_t* excluded;    // [layers, sealedPages, H, 512 / C / 32] bit j of a word: chunk 32 * word + j is an outlier

    // Sealed rows
    void* factorB;       // [layers, sealedRows, H * D, r] T: the transpose of B
    float* centres;      // [layers, sealedRows, H, D]: mean of the prompt's landmarks; null unless landmarks are e4m3
    int32_t* outlierIds; // [layers, sealedRows, H, outliers] ascending
    void* outlierKeys;   // [layers, sealedRows, H, outliers * C, D] T, exact
    void* outlierValues; // [layers, sealedRows, H, outliers * C / 8 units, D, 8] T, exact
    void* cacheKeys;     // [layers, sealedRows, H, cacheSlots, C, D] T, rebuilt, post-RoPE
    void* cacheValues;   // [layers, sealedRows, H, cacheSlots] chunks of values
    Entry* cacheOrder; // [layers, sealedRows, H, cacheSlots] every slot once, least recently used first; chunk -1: free

    // RoPE: angle of token p and frequency i is turn[p / 8][i] times step[p % 8][i] as complex numbers (cos, sin)
    float* ropeTurns; // [ceil(maximal tokens / 8), D / 2, 2]
    float* ropeSteps; // [8, D / 2, 2]

    // One step
    StepRow* steps; // [maxBatch]
    // One layer of one step
    float* logits; // scaled scores, [sum of scoreItems * H * 32 chunks, logitStride]; batch row b, KV head h, chunk c:
    // index (scoreBegin * H + h * scoreItems) * 32 + c. NaN: an outlier or past the end; a NaN score is -inf
    float*
        logitSums; // [sum of scoreItems * H, logitStride, 2]: maximum over the item's chunks that may be selected, and
                   // sum of exp(logit - maximum); (-inf, 0) where there is none
    int32_t logitStride; // G rounded up to an even number
    int32_t* hitCounts;  // [maxBatch, H]
    int32_t* missCounts; // [maxBatch, H]
    Entry* entries;      // [maxBatch, H, topK]: the hits in chunk order, then the misses in chunk order
    float* partials; // [partial, G, D + 2]: of one query head the unnormalised output O[D], maximum m of its scores,
                     // l = sum of exp(score - m); O = sum of exp(score - m) * value. Nothing attended: zeros, m = -inf
};

// Values of a chunk of one KV head: C / 8 units, each [D][8 tokens], in valueFormat. The same bytes on the host, in the
// chunk cache and (as T) among the outliers and in live pages, so that nothing is transposed on the way.
inline int32_t valueChunkBytes(View const& view)
{
    return view.chunkSize * view.headSize * (view.valueFormat == Format::kE4M3 ? 1 : 2);
}

// Splits of a KV head's outlier chunks, and of its selected chunks.
inline int32_t splitsOf(int32_t chunks, View const& view)
{
    return (chunks * view.chunkSize + kSPLIT_TOKENS - 1) / kSPLIT_TOKENS;
}

// Partials of a batch: first the live ones, index (liveBegin * H + h * liveSplits + split), at most
// H * (livePages * 128 / kSPLIT_TOKENS + maxBatch); from fixedPartials() on those of outliers, hits and misses, index
// fixedPartials() + (b * H + h) * (splitsOf(outliers) + 2 * splitsOf(topK)) + split.
inline int64_t fixedPartials(View const& view)
{
    return int64_t{view.kvHeads} * (int64_t{view.livePages} * kLIVE_PAGE_TOKENS / kSPLIT_TOKENS + view.maxBatch);
}

} // namespace trtllm_shadowkv::kernels
