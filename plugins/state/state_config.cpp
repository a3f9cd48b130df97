#include "state/state_config.h"

#include "state/require.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

constexpr int32_t kMAX_SLOTS = 1 << 16;
constexpr int32_t kMAX_PAGES = 1 << 20; // kernels count the chunks of all pages and heads in 32 bits
constexpr int32_t kRANK_STEP = 16;

int32_t ceilDiv(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

void requireSettings(tsk_state_config const& c)
{
    requireRange("element", c.element, 0, 1);
    requireRange("landmark_format", c.landmark_format, 0, 1);
    requireRange("value_format", c.value_format, 0, 1);
    requireRange("cache_slots", c.cache_slots, c.top_k, kMAX_CACHE_SLOTS);
    requireRange("max_tokens", c.max_tokens, 1, kMAX_TOKENS);
    requireThat(c.window >= c.chunk_size && c.window <= kMAX_TOKENS && c.window % c.chunk_size == 0,
        "window is " + std::to_string(c.window),
        "a multiple of chunk_size (" + std::to_string(c.chunk_size) + ") up to " + std::to_string(kMAX_TOKENS));
    int64_t const least = int64_t{c.window} + c.chunk_size - 1;
    requireThat(c.dense_limit == -1 || c.dense_limit >= least, "dense_limit is " + std::to_string(c.dense_limit),
        "at least window + chunk_size - 1 = " + std::to_string(least)
            + ", so that a sealed row has a chunk to seal, or -1: infinite");
}

void requireCapacity(tsk_state_config const& c)
{
    requireRange("slots", c.slots, 1, kMAX_SLOTS);
    requireRange("sealed_rows", c.sealed_rows, 0, c.slots);
    requireRange("max_batch", c.max_batch, 1, kMAX_BATCH);
    requireRange("live_pages", c.live_pages, 1, kMAX_PAGES);
    requireRange("sealed_pages", c.sealed_pages, 0, kMAX_PAGES);
    requireThat((c.sealed_rows == 0) == (c.sealed_pages == 0),
        "sealed_rows is " + std::to_string(c.sealed_rows) + " and sealed_pages is " + std::to_string(c.sealed_pages),
        "both 1 or more, or both 0 where no row is ever sealed");
    requireRange("row_groups", c.row_groups, 0, kMAX_ROW_GROUPS);
    requireRange("reserved", c.reserved, 0, 0);
}

} // namespace

void requireOps(tsk_state_config const& c)
{
    requireRange("num_layers", c.num_layers, 1, kMAX_LAYERS);
    requireRange("num_kv_heads", c.num_kv_heads, 1, kMAX_KV_HEADS);
    requireThat(
        c.num_heads >= 1 && c.num_heads % c.num_kv_heads == 0 && c.num_heads / c.num_kv_heads <= kMAX_GROUP_HEADS,
        "num_heads is " + std::to_string(c.num_heads) + " with num_kv_heads " + std::to_string(c.num_kv_heads),
        "1 to " + std::to_string(kMAX_GROUP_HEADS) + " query heads for each KV head");
    requireThat(c.head_size == 64 || c.head_size == 96 || c.head_size == 128,
        "head_size is " + std::to_string(c.head_size), "64, 96 or 128");
    requireThat(c.chunk_size == 8 || c.chunk_size == 16, "chunk_size is " + std::to_string(c.chunk_size), "8 or 16");
    int32_t const maxRank = std::min(kMAX_RANK, c.num_kv_heads * c.head_size);
    requireThat(c.rank >= kRANK_STEP && c.rank <= maxRank && c.rank % kRANK_STEP == 0,
        "rank is " + std::to_string(c.rank),
        "a multiple of " + std::to_string(kRANK_STEP) + " up to " + std::to_string(maxRank)
            + " (512 and num_kv_heads * head_size)");
    requireRange("top_k", c.top_k, 1, kMAX_TOP_K);
    requireRange("outliers", c.outliers, 1, kMAX_OUTLIERS);
}

void requireConfig(tsk_state_config const& c)
{
    requireRange("device", c.device, -1, std::numeric_limits<int32_t>::max());
    requireOps(c);
    requireSettings(c);
    requireCapacity(c);
    requireThat(
        c.inverse_frequencies != nullptr, "inverse_frequencies is null", "the host address of head_size / 2 numbers");
    for (int32_t i = 0; i < c.head_size / 2; ++i)
    {
        requireThat(std::isfinite(c.inverse_frequencies[i]),
            "inverse_frequencies[" + std::to_string(i) + "] is " + std::to_string(c.inverse_frequencies[i]),
            "a finite number");
    }
}

SealRule sealRule(tsk_state_config const& c)
{
    return {c.chunk_size, c.window, c.dense_limit < 0 ? std::numeric_limits<int64_t>::max() : c.dense_limit};
}

bool anyRowSeals(tsk_state_config const& c)
{
    return c.sealed_rows > 0 && c.dense_limit >= 0 && c.max_tokens > c.dense_limit;
}

View sizesOf(tsk_state_config const& c)
{
    SealRule const rule = sealRule(c);
    bool const seals = anyRowSeals(c);
    View v{};
    v.element = static_cast<Element>(c.element);
    v.landmarkFormat = static_cast<Format>(c.landmark_format);
    v.valueFormat = static_cast<Format>(c.value_format);
    v.layers = c.num_layers;
    v.heads = c.num_heads;
    v.kvHeads = c.num_kv_heads;
    v.group = c.num_heads / c.num_kv_heads;
    v.headSize = c.head_size;
    v.chunkSize = c.chunk_size;
    v.chunkShift = c.chunk_size == 8 ? 3 : 4;
    v.rank = c.rank;
    v.topK = c.top_k;
    v.outliers = c.outliers;
    v.window = c.window;
    v.cacheSlots = c.cache_slots;
    v.slots = c.slots;
    v.sealedRows = seals ? c.sealed_rows : 0;
    v.maxBatch = c.max_batch;
    v.livePages = c.live_pages;
    v.sealedPages = seals ? c.sealed_pages : 0;
    v.liveTableStride = std::max(ceilDiv(c.max_tokens, kLIVE_PAGE_TOKENS), seals ? rule.ring() : 0);
    int32_t const chunks = seals ? rule.sealedChunks(int64_t{c.max_tokens} + 1) : 0;
    v.sealedTableStride = std::max(1, ceilDiv(chunks * c.chunk_size, kSEALED_PAGE_TOKENS));
    v.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_size)));
    v.logitStride = v.group + v.group % 2;
    return v;
}

} // namespace trtllm_shadowkv
