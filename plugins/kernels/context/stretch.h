// What the kernels of a stretch share.
#pragma once

#include "kernels/context/context.h"

namespace trtllm_shadowkv::kernels
{

inline bool isValid(View const& view, int32_t layer, Stretch const& stretch)
{
    return layer >= 0 && layer < view.layers && stretch.slot >= 0 && stretch.slot < view.slots && stretch.start >= 0
           && stretch.length >= 1 && stretch.start <= kMAX_TOKENS - stretch.length;
}

} // namespace trtllm_shadowkv::kernels
