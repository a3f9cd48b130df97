// What the kernels of a seal share.
#pragma once

#include "kernels/context/seal_scratch.h"

namespace trtllm_shadowkv::kernels
{

// The layer's array at `offset` of the scratch; `index`: from Seal::layerBegin on.
template <typename T>
__device__ __forceinline__ T* scratchOf(Seal const& seal, SealLayout const& layout, int32_t index, int64_t offset)
{
    return reinterpret_cast<T*>(
        static_cast<char*>(seal.scratch) + static_cast<uint32_t>(index) * layout.bytes + offset);
}

// Page id of token p of a prompt, whose pages do not wrap.
__device__ __forceinline__ int32_t promptPage(View const& v, int32_t slot, int32_t p)
{
    return v.liveTable[size_t{static_cast<uint32_t>(slot)} * v.liveTableStride + p / kLIVE_PAGE_TOKENS];
}

inline bool isValid(View const& view, Seal const& seal)
{
    return seal.slot >= 0 && seal.slot < view.slots && seal.sealedRow >= 0 && seal.sealedRow < view.sealedRows
           && seal.chunks >= 1 && seal.chunks <= kMAX_TOKENS >> view.chunkShift && seal.outliers >= 0
           && seal.outliers <= std::min(view.outliers, seal.chunks) && seal.layerBegin >= 0
           && seal.layerBegin < seal.layerEnd && seal.layerEnd <= view.layers && seal.scratch != nullptr;
}

} // namespace trtllm_shadowkv::kernels
