// A block's part of causal attention: 128 query rows of one KV head, as many tokens of the stretch as there is room for with
// all query heads of the group, so that a key is read once for the group. Row = token * G + head of the group.
//
// Keys come in tiles from position 0 on, and a row's sums are brought up to date tile by tile, so what a row gets
// depends on its position alone: keys past it weigh exactly 0.
#pragma once

#include "kernels/context/context.h"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kROWS = 128; // query rows: tokens times the heads of a group

// Tokens of a block.
__host__ __device__ __forceinline__ int32_t partTokens(View const& view)
{
    return kROWS / view.group;
}

// A block's tokens and head.
struct Part
{
    int32_t head;  // KV head
    int32_t first; // token, counted from the stretch's first
    int32_t rows;  // query rows that there are
    int32_t end;   // position after the last key
};

__device__ __forceinline__ Part partOf(View const& view, Stretch const& stretch)
{
    int32_t const tokens = partTokens(view);
    int32_t const parts = static_cast<int32_t>(gridDim.x) / view.kvHeads;
    // Those with the most keys first; heads side by side, so that no block is far ahead of others with the same keys.
    int32_t const number = parts - 1 - static_cast<int32_t>(blockIdx.x) / view.kvHeads;
    Part part;
    part.head = static_cast<int32_t>(blockIdx.x) % view.kvHeads;
    part.first = number * tokens;
    int32_t const taken = min(tokens, stretch.length - part.first);
    part.rows = taken * view.group;
    part.end = stretch.start + part.first + taken;
    return part;
}

// Elements from the first to a row of the part, in q and out.
template <int32_t D>
__device__ __forceinline__ size_t rowAt(View const& view, Part const& part, int32_t row)
{
    int32_t const token = row / view.group;
    int32_t const head = part.head * view.group + row - token * view.group;
    return (size_t{static_cast<uint32_t>(part.first + token)} * view.heads + head) * D;
}

inline uint32_t partBlocks(View const& view, Stretch const& stretch)
{
    int32_t const parts = (stretch.length + partTokens(view) - 1) / partTokens(view);
    return static_cast<uint32_t>(parts) * static_cast<uint32_t>(view.kvHeads);
}

} // namespace
} // namespace trtllm_shadowkv::kernels
