// Where the kernels of a seal keep what the next ones need: one block a layer, layers one after the other.
#pragma once

#include "kernels/context/context.h"

#include <algorithm>
#include <cstddef>

namespace trtllm_shadowkv::kernels
{

inline constexpr int64_t kSEAL_ALIGNMENT = 256; // bytes
inline constexpr int32_t kMEASURE_BLOCKS = 64;  // partial sums of a layer and KV head, in measureKeys

// Offsets in bytes from a layer's begin. Cosines are no longer needed when the Gram matrix is made.
struct SealLayout
{
    int64_t largest;  // [1] uint32: bits of the largest |key| as float32
    int64_t sums;     // [H, kMEASURE_BLOCKS, D] float32: measureKeys
    int64_t cosines;  // [H, chunks] float32
    int64_t gram;     // [H D, H D] float32
    int64_t basis;    // two [H D, r] float32: Q and G Q
    int64_t products; // two [r, r] float64: Y^T Y and the inverse of its Cholesky factor
    int64_t bytes;    // of a layer, a multiple of kSEAL_ALIGNMENT
};

inline SealLayout sealLayout(View const& v, int32_t chunks)
{
    int64_t const width = int64_t{v.kvHeads} * v.headSize;
    int64_t at = 0;
    auto const take = [&](int64_t bytes)
    {
        int64_t const begin = at;
        at += (bytes + kSEAL_ALIGNMENT - 1) / kSEAL_ALIGNMENT * kSEAL_ALIGNMENT;
        return begin;
    };
    SealLayout layout{};
    layout.largest = take(4);
    layout.sums = take(int64_t{4} * v.kvHeads * kMEASURE_BLOCKS * v.headSize);
    layout.cosines = at;
    layout.gram = take(std::max(4 * width * width, int64_t{4} * v.kvHeads * chunks));
    layout.basis = take(2 * 4 * width * v.rank);
    layout.products = take(int64_t{2} * 8 * v.rank * v.rank);
    layout.bytes = at;
    return layout;
}

} // namespace trtllm_shadowkv::kernels
