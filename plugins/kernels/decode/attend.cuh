// Attention of one query token of a KV head's query heads over a span of tokens: the work of a block, one partial.
#pragma once

#include "kernels/decode/attend_tile.cuh"

namespace trtllm_shadowkv::kernels
{

inline constexpr int32_t kATTEND_WARPS = 4;
inline constexpr int32_t kATTEND_THREADS = kATTEND_WARPS * 32;
inline constexpr int32_t kATTEND_BLOCKS = 2;                // a multiprocessor, at least: up to 255 registers a thread
inline constexpr int32_t kLOOK_UP_TILES = 32 / kTILE_UNITS; // of a warp: one unit a lane
inline constexpr int32_t kPAGE_UNITS = kLIVE_PAGE_TOKENS / kUNIT;
// Live, outliers, hits and misses of a row and head, for chunks of 16 tokens.
inline constexpr int32_t kMAX_PARTIALS
    = kMAX_LIVE_SPLITS + kMAX_OUTLIERS * 16 / kSPLIT_TOKENS + kMAX_TOP_K * 16 / kSPLIT_TOKENS + 1;
inline constexpr float kLN_2 = 0.693147180559945309F;

enum class Part : int32_t
{
    kLIVE = 0,
    kOUTLIERS = 1,
    kHITS = 2,
    kMISSES = 3
};

// What a block attends to: one split of one part of a batch row and KV head.
struct Span
{
    Part part;
    int32_t row;
    int32_t head;
    int32_t split;
    int32_t tokens; // of the split, at least 1
};

// Where the units of a span lie. Units of all parts look alike, K [8, D] and V [D, 8], so an index is all they need.
struct Source
{
    unsigned char const* keys;   // of unit 0
    unsigned char const* values; // of unit 0
    int32_t first; // live: position of the first token; outliers: its unit; hits and misses: index of the first Entry
};

template <int32_t D, int32_t NT>
struct AttendShared
{
    // A row of D + 4 floats: the lanes of a warp then write to 32 different banks.
    struct Warps
    {
        float o[kATTEND_WARPS][NT * 8][D + 4];
        float2 stats[kATTEND_WARPS][NT * 8]; // m and l
    };

    uint4 query[NT][D / 32][32]; // as lanes take it
    Warps warps;
};

// First partial of a row and head: live ones, and those of outliers, hits and misses.
__device__ __forceinline__ size_t livePartial(View const& view, StepRow const& step, int32_t head)
{
    return size_t{static_cast<uint32_t>(step.liveBegin)} * view.kvHeads
           + size_t{static_cast<uint32_t>(head)} * step.liveSplits;
}

struct FixedPartials
{
    size_t outliers;
    size_t hits;
    size_t misses;
};

__device__ __forceinline__ int32_t deviceSplits(View const& view, int32_t chunks)
{
    return ((chunks << view.chunkShift) + kSPLIT_TOKENS - 1) / kSPLIT_TOKENS;
}

__device__ __forceinline__ FixedPartials fixedPartialsOf(View const& view, int32_t row, int32_t head)
{
    int32_t const ofOutliers = deviceSplits(view, view.outliers);
    int32_t const ofChunks = deviceSplits(view, view.topK);
    size_t const live
        = size_t{static_cast<uint32_t>(view.kvHeads)}
          * (size_t{static_cast<uint32_t>(view.livePages)} * kLIVE_PAGE_TOKENS / kSPLIT_TOKENS + view.maxBatch);
    size_t const pair = size_t{static_cast<uint32_t>(row)} * view.kvHeads + head;
    size_t const first = live + pair * (ofOutliers + 2 * ofChunks);
    return {first, first + ofOutliers, first + ofOutliers + ofChunks};
}

__device__ __forceinline__ size_t partialOf(View const& view, StepRow const& step, Span const& span)
{
    FixedPartials const fixed = fixedPartialsOf(view, span.row, span.head);
    size_t const first = span.part == Part::kLIVE       ? livePartial(view, step, span.head)
                         : span.part == Part::kOUTLIERS ? fixed.outliers
                         : span.part == Part::kHITS     ? fixed.hits
                                                        : fixed.misses;
    return first + span.split;
}

template <typename T, int32_t D>
__device__ __forceinline__ Source sourceOf(View const& view, int32_t layer, StepRow const& step, Span const& span)
{
    constexpr size_t kUNIT_BYTES = size_t{kUNIT} * D * sizeof(T);
    Source source;
    if (span.part == Part::kLIVE)
    {
        size_t const ofHeads = size_t{static_cast<uint32_t>(view.kvHeads)} * kPAGE_UNITS;
        size_t const unit
            = size_t{static_cast<uint32_t>(layer)} * view.livePages * 2 * ofHeads + span.head * kPAGE_UNITS;
        source.keys = static_cast<unsigned char const*>(view.live) + unit * kUNIT_BYTES;
        source.values = source.keys + ofHeads * kUNIT_BYTES;
        source.first = (step.row.published << view.chunkShift) + span.split * step.splitTokens;
        return source;
    }
    size_t const head = sealedHead(view, layer, step.row.sealedRow, span.head);
    int32_t const chunkUnits = view.chunkSize / kUNIT;
    if (span.part == Part::kOUTLIERS)
    {
        size_t const offset = head * view.outliers * chunkUnits * kUNIT_BYTES;
        source.keys = static_cast<unsigned char const*>(view.outlierKeys) + offset;
        source.values = static_cast<unsigned char const*>(view.outlierValues) + offset;
        source.first = span.split * (kSPLIT_TOKENS / kUNIT);
        return source;
    }
    size_t const unit = head * view.cacheSlots * chunkUnits;
    source.keys = static_cast<unsigned char const*>(view.cacheKeys) + unit * kUNIT_BYTES;
    source.values = static_cast<unsigned char const*>(view.cacheValues)
                    + unit * (view.valueFormat == Format::kE4M3 ? size_t{kUNIT} * D : kUNIT_BYTES);
    int32_t const pair = span.row * view.kvHeads + span.head;
    source.first = pair * view.topK + (span.part == Part::kMISSES ? view.hitCounts[pair] : 0)
                   + ((span.split * kSPLIT_TOKENS) >> view.chunkShift);
    return source;
}

struct Unit
{
    uint32_t index;
    int32_t chunk; // -1: not one of the chunk cache
};

// Unit number u of a span.
__device__ __forceinline__ Unit lookUp(View const& view, Span const& span, Source const& source, int32_t u)
{
    if (span.part == Part::kLIVE)
    {
        int32_t const p = source.first + u * kUNIT;
        StepRow const& step = view.steps[span.row];
        uint32_t const page = livePage(view, step.slot, step.row.ring, p);
        return {page * (2U * view.kvHeads * kPAGE_UNITS) + p % kLIVE_PAGE_TOKENS / kUNIT, -1};
    }
    if (span.part == Part::kOUTLIERS)
    {
        return {static_cast<uint32_t>(source.first + u), -1};
    }
    int32_t const chunkUnits = view.chunkSize / kUNIT;
    int2 const entry
        = *reinterpret_cast<int2 const*>(view.entries + source.first + ((u * kUNIT) >> view.chunkShift)); // chunk, slot
    return {static_cast<uint32_t>(entry.y * chunkUnits + (u & (chunkUnits - 1))), entry.x};
}

// Looks up the units of a warp's tiles `tile`, tile + 4, ...: unit lane % 4 of the (lane / 4)th. A unit past the end is
// replaced by the first one of its tile, which is as good to read as any that is masked.
__device__ __forceinline__ Unit lookUpTiles(
    View const& view, Span const& span, Source const& source, int32_t tile, int32_t lane)
{
    int32_t const units = (span.tokens + kUNIT - 1) / kUNIT;
    int32_t const first = (tile + lane / kTILE_UNITS * kATTEND_WARPS) * kTILE_UNITS;
    if (first >= units)
    {
        return {0U, -1};
    }
    int32_t const u = first + lane % kTILE_UNITS;
    return lookUp(view, span, source, u < units ? u : first);
}

// log2 of the scale of the unit's values.
__device__ __forceinline__ float logScale(View const& view, int32_t layer, Span const& span, Unit unit)
{
    if (unit.chunk < 0)
    {
        return 0.0F;
    }
    int32_t const page = sealedPage(view, view.steps[span.row].slot, unit.chunk);
    return __log2f(view.valueScales[pagedChunk(view, layer, page, span.head, unit.chunk)]);
}

// The query heads' [D] in the order in which lanes take them, zeros for heads that there are not. Of the whole block.
template <typename T, int32_t D, int32_t NT>
struct StagedQuery
{
    static constexpr int32_t kPIECES = NT * (D / 32) * 32;
    static constexpr int32_t kLOADS = (kPIECES + kATTEND_THREADS - 1) / kATTEND_THREADS;
    uint4 pieces[kLOADS];

    __device__ __forceinline__ void load(View const& view, T const* q, Span const& span)
    {
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            int32_t const piece = k * kATTEND_THREADS + static_cast<int32_t>(threadIdx.x); // [NT][D / 32][8][4]
            int32_t const head = piece / D * 8 + piece / 4 % 8;
            int32_t const d = (piece / 32 % (D / 32) * 4 + piece % 4) * 8;
            pieces[k] = make_uint4(0U, 0U, 0U, 0U);
            if (piece < kPIECES && head < view.group)
            {
                size_t const row = size_t{static_cast<uint32_t>(span.row)} * view.heads + span.head * view.group + head;
                pieces[k] = load16(q + row * D + d);
            }
        }
    }

    __device__ __forceinline__ void store(uint4 (&query)[NT][D / 32][32]) const
    {
#pragma unroll
        for (int32_t k = 0; k < kLOADS; ++k)
        {
            int32_t const piece = k * kATTEND_THREADS + static_cast<int32_t>(threadIdx.x);
            if (piece < kPIECES)
            {
                query[piece / D][piece / 32 % (D / 32)][piece % 32] = pieces[k];
            }
        }
    }
};

// Attends each warp to its tiles of the span: number `warp`, warp + 4, ... kSCALED: values are e4m3 with a scale a
// chunk, else T. One barrier, and all threads of the block must come here.
template <typename T, int32_t D, int32_t NT, bool kSCALED>
__device__ __forceinline__ void attendTiles(View const& view, int32_t layer, T const* q, Span const& span,
    Source const& source, uint4 (&shared)[NT][D / 32][32], Accumulator<D, NT>& acc)
{
    using Piece = ValuePiece<kSCALED>;
    // Keys of the next tile are under way while this one's values are used, and the other way round, but where
    // registers are too short: there keys and values take turns.
    constexpr bool kAHEAD = NT == 1 || D < 128;
    int32_t const lane = threadIdx.x % 32;
    int32_t const tiles = (span.tokens + kTILE_TOKENS - 1) / kTILE_TOKENS;
    int32_t tile = threadIdx.x / 32;

    // The query and the first look-up wait for memory together.
    StagedQuery<T, D, NT> staged;
    staged.load(view, q, span);
    Unit unit = lookUpTiles(view, span, source, tile, lane);
    staged.store(shared);
    __syncthreads();
    clear(acc);
    if (tile >= tiles)
    {
        return;
    }

    int32_t looked = 0; // which of the tiles looked up is next to load
    uint4 keys[4][D / 32];
    Piece values[D / 8];
    auto const nextKeys = [&]()
    {
        size_t const index = __shfl_sync(kFULL_WARP, unit.index, looked * kTILE_UNITS + lane / 8);
        loadKeys<D>(keys, source.keys + index * (kUNIT * D * sizeof(T)), lane);
    };
    auto const valuesIndex
        = [&]() -> uint32_t { return __shfl_sync(kFULL_WARP, unit.index, looked * kTILE_UNITS + lane % 4); };
    auto const nextValues
        = [&](size_t index) { loadValues<D>(values, source.values + index * (D * sizeof(Piece)), lane); };
    nextKeys();
    if constexpr (kAHEAD)
    {
        nextValues(valuesIndex());
    }
    float logs = kSCALED ? logScale(view, layer, span, unit) : 0.0F;

    uint4 query[D / 32];
    float top[NT][2];
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
        top[n][0] = top[n][1] = -INFINITY;
    }
#pragma unroll
    for (int32_t j = 0; j < D / 32; ++j)
    {
        query[j] = shared[0][j][lane];
    }
    float const scale = view.scale * kLOG2_E;
#pragma unroll 1
    while (true)
    {
        float s[2][NT][4];
        score<T, D, NT>(s, keys, query, shared, lane);
        uint32_t const late = kAHEAD ? 0U : valuesIndex();
        float const log = kSCALED ? __shfl_sync(kFULL_WARP, logs, looked * kTILE_UNITS + lane / 8) : 0.0F;
        int32_t const left = span.tokens - tile * kTILE_TOKENS;
        tile += kATTEND_WARPS;
        bool const isMore = tile < tiles;
        if (isMore)
        {
            if (++looked == kLOOK_UP_TILES)
            {
                looked = 0;
                unit = lookUpTiles(view, span, source, tile, lane);
                logs = kSCALED ? logScale(view, layer, span, unit) : 0.0F;
            }
            if constexpr (kAHEAD)
            {
                nextKeys();
            }
        }
        if constexpr (!kAHEAD)
        {
            nextValues(late); // behind a branch, or the compiler would move it up
        }
        weighTokens<D, NT, kSCALED>(s, acc, top, left - lane / 8 * kUNIT - lane / 4 % 2, scale, log);
        if constexpr (kSCALED)
        {
            // Chunks are whole units, and a unit past the end is a copy of one that counts: nothing to mask.
            addValues<__half, D, NT>(acc, values, s);
        }
        else
        {
            if (left < kTILE_TOKENS)
            {
                maskValues<D>(values, left - lane % 4 * kUNIT);
            }
            addValues<T, D, NT>(acc, values, s);
        }
        if (!isMore)
        {
            break;
        }
        if constexpr (kAHEAD)
        {
            nextValues(valuesIndex());
        }
        else
        {
            nextKeys();
        }
    }
    finish<D, NT, kSCALED>(acc, top);
}

// Adds up the warps' accumulators, in order, and writes the partial. Ends without a barrier: shared.warps may be
// written again after the next one.
template <int32_t D, int32_t NT>
__device__ __forceinline__ void storePartial(
    View const& view, size_t partial, AttendShared<D, NT>& shared, Accumulator<D, NT> const& acc)
{
    int32_t const lane = threadIdx.x % 32;
    int32_t const warp = threadIdx.x / 32;
    int32_t const g = lane / 4;
#pragma unroll
    for (int32_t n = 0; n < NT; ++n)
    {
#pragma unroll
        for (int32_t c = 0; c < 2; ++c)
        {
            int32_t const head = n * 8 + lane % 4 * 2 + c;
            if (head < view.group)
            {
                float* const o = shared.warps.o[warp][head];
#pragma unroll
                for (int32_t i = 0; i < D / 16; ++i)
                {
                    o[16 * i + g] = acc.o[i][n][c];
                    o[16 * i + 8 + g] = acc.o[i][n][2 + c];
                }
                if (g == 0)
                {
                    shared.warps.stats[warp][head] = make_float2(acc.m[n][c], acc.l[n][c]);
                }
            }
        }
    }
    __syncthreads();
    float* const out = view.partials + partial * (view.group * (D + 2));
    for (int32_t e = threadIdx.x; e < view.group * D; e += kATTEND_THREADS)
    {
        int32_t const head = e / D;
        int32_t const d = e % D;
        float2 stats[kATTEND_WARPS];
        float m = -INFINITY;
#pragma unroll
        for (int32_t w = 0; w < kATTEND_WARPS; ++w)
        {
            stats[w] = shared.warps.stats[w][head];
            m = fmaxf(m, stats[w].x);
        }
        float const base = finiteMaximum(m);
        float o = 0.0F;
        float l = 0.0F;
#pragma unroll
        for (int32_t w = 0; w < kATTEND_WARPS; ++w)
        {
            float const factor = powerOfTwo(stats[w].x - base);
            o += factor * shared.warps.o[w][head][d];
            l += factor * stats[w].y;
        }
        out[head * (D + 2) + d] = o;
        if (d == 0)
        {
            *reinterpret_cast<float2*>(out + head * (D + 2) + D) = make_float2(m * kLN_2, l);
        }
    }
}

// All of a block's work on a span: attends, and writes the span's partial.
template <typename T, int32_t D, int32_t NT>
__device__ __forceinline__ void attendSpan(
    View const& view, int32_t layer, T const* q, Span const& span, AttendShared<D, NT>& shared)
{
    StepRow const& step = view.steps[span.row];
    Source const source = sourceOf<T, D>(view, layer, step, span);
    Accumulator<D, NT> acc;
    bool const isCached = span.part == Part::kHITS || span.part == Part::kMISSES;
    if (isCached && view.valueFormat == Format::kE4M3)
    {
        attendTiles<T, D, NT, true>(view, layer, q, span, source, shared.query, acc);
    }
    else
    {
        attendTiles<T, D, NT, false>(view, layer, q, span, source, shared.query, acc);
    }
    storePartial<D, NT>(view, partialOf(view, step, span), shared, acc);
}

// Calls f(type tag, head size, tiles of 8 query heads).
template <typename F>
cudaError_t dispatchAttend(View const& view, F&& f)
{
    return dispatchShape(view,
        [&](auto tag, auto size) -> cudaError_t
        {
            return view.group <= 8 ? f(tag, size, std::integral_constant<int32_t, 1>{})
                                   : f(tag, size, std::integral_constant<int32_t, 2>{});
        });
}

} // namespace trtllm_shadowkv::kernels
