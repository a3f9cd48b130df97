// What a state is made for: the checks of tsk_state_config, and the arithmetic that follows from it.
#pragma once

#include "kernels/decode/view.h"
#include "state/c_api.h"

#include <cstdint>

namespace trtllm_shadowkv
{

inline constexpr int32_t kMAX_LAYERS = 1024;

// When rows are sealed, and how much of them (docs/adr/0001).
struct SealRule
{
    int32_t chunkSize;
    int32_t window;
    int64_t denseLimit; // INT64_MAX: infinite

    // Chunks outside the window of a sealed row of `tokens`.
    int32_t sealedChunks(int64_t tokens) const noexcept
    {
        return tokens <= window ? 0 : static_cast<int32_t>((tokens - window) / chunkSize);
    }

    // Whether a row of `tokens`, none of its own accord dense, is sealed before it takes another one.
    bool sealsAt(int64_t tokens) const noexcept
    {
        return tokens + 1 > denseLimit;
    }

    // Live pages of a sealed row. Its window is at most window + chunkSize - 1 tokens from a multiple of chunkSize, so
    // its last token is at most window + 126 after the start of the page it begins in.
    int32_t ring() const noexcept
    {
        return (window + kernels::kLIVE_PAGE_TOKENS - 2) / kernels::kLIVE_PAGE_TOKENS + 1;
    }
};

// Throws Failure: TSK_INVALID_ARGUMENT, naming the field. Does not look at the device.
void requireConfig(tsk_state_config const& config);

// What of it an engine's ops are made for: num_layers, num_heads, num_kv_heads, head_size, chunk_size, rank, top_k,
// outliers. Throws as requireConfig().
void requireOps(tsk_state_config const& config);

// The functions below expect a configuration that requireConfig has accepted.

SealRule sealRule(tsk_state_config const& config);

// Whether some row could ever be sealed: there is room for it, and it can grow beyond the limit.
bool anyRowSeals(tsk_state_config const& config);

// Shape and capacity of the view; all addresses null, no multiprocessors. Nothing of what only sealed rows have where
// no row is ever sealed.
kernels::View sizesOf(tsk_state_config const& config);

} // namespace trtllm_shadowkv
