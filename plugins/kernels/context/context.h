// Kernels that read a prompt, stretch by stretch, and seal it. None synchronises, and each may be captured; shapes were
// checked when the view was made (state/cuda_state.h).
//
// Live pages hold every token of the row: page of token p is entry p / 128 of its table (View::liveTable). Sealed state
// goes to the row's sealed pages (View::sealedTable) and to its sealed row, as view.h lays it out.
#pragma once

#include "kernels/decode/view.h"

#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// Tokens [start, start + length) of one row, which holds those before them.
struct Stretch
{
    int32_t slot;
    int32_t start;
    int32_t length; // at least 1
};

// RoPE; K and V of a stretch into the live pages.
//   qkv        device [length, (Hq + 2 H) D] T, Q then K then V, pre-RoPE
//   positions  device [length]: start, start + 1, ...; anything else sets kFAULT_POSITION
//   q          device [length, Hq D] T, post-RoPE
cudaError_t appendStretch(View const& view, int32_t layer, Stretch const& stretch, void const* qkv,
    int32_t const* positions, void* q, cudaStream_t stream);

// Exact causal attention: token p of the stretch attends to tokens 0 to p of its row's live pages. Tiles are fixed by
// position, so that a token's bits do not depend on how its prompt was cut into stretches.
//   q    as appendStretch wrote it
//   out  device [length, Hq D] T
cudaError_t attendStretch(
    View const& view, int32_t layer, Stretch const& stretch, void const* q, void* out, cudaStream_t stream);

// Values of chunks [begin, end) from the live pages into the row's value region (View::valueRegion; `valueStride` chunks
// from a KV head to the next), e4m3 with their scales into View::valueScales.
cudaError_t storeValues(View const& view, int32_t layer, int32_t slot, int32_t valueStride, int32_t begin, int32_t end,
    cudaStream_t stream);

// A row being sealed: its first `chunks` chunks, in layers [layerBegin, layerEnd).
struct Seal
{
    int32_t slot;
    int32_t sealedRow;
    int32_t chunks;   // at least 1
    int32_t outliers; // outlier chunks of each KV head, min(View::outliers, chunks)
    int32_t layerBegin;
    int32_t layerEnd;
    void* scratch; // of sealScratchBytes; what it holds between the calls below belongs to them
};

// Bytes of Seal::scratch, which start at a multiple of 256, for one layer of a row of `chunks` chunks. For more layers
// as many times that.
int64_t sealScratchBytes(View const& view, int32_t chunks);

// The calls of a seal, in this order, all for the same layers. Keys that are not finite set kFAULT_KEYS, and what is then
// written is of no use to this row and of no harm to others.

// Mean of the head's sealed keys, post-RoPE (View::centres where landmarks are e4m3: the mean of all landmarks), and the
// largest magnitude of a layer's sealed keys (into the scratch). Sums are in a fixed order.
cudaError_t measureKeys(View const& view, Seal const& seal, cudaStream_t stream);

// Landmarks of all chunks: the mean of a chunk's post-RoPE keys, in float32, as T or minus the head's centre as e4m3 with
// its scale; and into the scratch the least cosine between it and its keys, -1 where either is zero or not finite.
cudaError_t writeLandmarks(View const& view, Seal const& seal, cudaStream_t stream);

// Outlier chunks of each KV head: chunk 0 and the outliers - 1 others of the least cosine, ties to the lower id. Ids in
// ascending order, bit map (View::excluded, all words of the row's chunks), exact keys and values.
cudaError_t writeOutliers(View const& view, Seal const& seal, cudaStream_t stream);

// Replaces the sealed keys in the live pages by what they were before RoPE, rounded to T; one that is not finite, or does
// not fit T, sets kFAULT_KEYS. A row's window stays as it is; the row cannot be sealed again.
cudaError_t unrotateKeys(View const& view, Seal const& seal, cudaStream_t stream);

// Gram matrix K^T K [H D, H D] float32 of the un-rotated keys, divided by a power of four that brings the largest key of
// the layer near 1; into the scratch. Both triangles.
cudaError_t computeGram(View const& view, Seal const& seal, cudaStream_t stream);

// View::factorB: r orthonormal rows that span, nearly, the r leading eigenvectors of the Gram matrix, by subspace
// iteration; completed by any orthonormal rows where the keys' rank is lower. Deterministic. Shifts the Gram matrix's
// diagonal: it is of no use afterwards.
cudaError_t findBasis(View const& view, Seal const& seal, cudaStream_t stream);

// View::factorA: A = K B^T of the un-rotated keys, with B as it was stored.
cudaError_t projectPrompt(View const& view, Seal const& seal, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
