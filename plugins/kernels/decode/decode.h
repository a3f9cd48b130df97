// Kernels of one decode step, in the order in which a layer launches them. Each launches one kernel on `stream`, never
// synchronises and may be captured. Shapes were checked when the view was made (state/cuda_state.h).
//
// Batch rows are [begin, end) of a step's rows; a row group is scored, selected, fetched and finished by itself. No
// result of a row depends on its neighbours, on its place in the batch or on how rows are grouped.
#pragma once

#include "kernels/decode/view.h"

#include <cuda_runtime_api.h>

namespace trtllm_shadowkv::kernels
{

// Head of a step: advances each row's counters (Row), publishes the chunk sealed in the step before, decides which chunk
// is sealed in this one, and writes View::steps with the layout of the step's work.
//   slots  device [batch]: slot of each row, -1 for a padding row; a slot out of range sets kFAULT_SLOT and pads
cudaError_t stepPrologue(View const& view, int32_t const* slots, int32_t batch, cudaStream_t stream);

// RoPE; K and V of the current token into the live pages.
//   qkv        device [batch, (Hq + 2 H) D] T, Q then K then V, pre-RoPE
//   positions  device [batch]: the row's length - 1, and 0 for a padding row; anything else sets kFAULT_POSITION
//   q          device [batch, Hq D] T, post-RoPE; zeros for a padding row
cudaError_t appendTokens(View const& view, int32_t layer, void const* qkv, int32_t const* positions, void* q,
    int32_t batch, cudaStream_t stream);

// For every row that seals a chunk in this step: A rows (projection of the un-rotated keys on the row's B), landmark,
// values to the row's value region, scales, its outlier bit cleared, and what the projection lost (by Pythagoras, B's
// rows being orthonormal).
cudaError_t sealChunks(View const& view, int32_t layer, int32_t batch, cudaStream_t stream);

// logits and logitSums of batch rows [begin, end).
//   q       as appendTokens wrote it
//   blocks  blocks of 512 threads, one a multiprocessor: leave some to the fetch
cudaError_t scoreLandmarks(
    View const& view, int32_t layer, void const* q, int32_t begin, int32_t end, int32_t blocks, cudaStream_t stream);

// Bytes of shared memory that selectChunks wants for rows of up to `chunks` chunks: at most 99 KB.
int32_t selectSharedBytes(int32_t chunks);

// The topK best chunks of every KV head by max over its query heads of logit - log-sum-exp(logits); ties take the lower
// id. A head whose log-sum-exp is not finite, and a score that is not a number, count as -inf. Looks them up in the
// chunk cache: hits, misses, and the least recently used slots for the misses; what is used in one step becomes most
// recently used in chunk order. Writes hitCounts, missCounts, entries, cacheOrder, counters.
//   selection    device [batch, H, topK]: chunk ids in ascending order, padded with -1; all -1 for a dense or padding row
//   sharedBytes  of selectSharedBytes
//   isAfterScore the kernel before on `stream` is scoreLandmarks: this one may start before that ends
cudaError_t selectChunks(View const& view, int32_t layer, int32_t* selection, int32_t begin, int32_t end,
    int32_t sharedBytes, bool isAfterScore, cudaStream_t stream);

// Values of the missing chunks from the value region into the chunk cache, rows and heads in order, chunks ascending.
//   blocks  blocks of 1,024 threads, one a multiprocessor; 8 fill a PCIe gen5 x16 link
cudaError_t fetchValues(
    View const& view, int32_t layer, int32_t begin, int32_t end, int32_t blocks, cudaStream_t stream);

// Keys of the missing chunks, A B with RoPE at their positions, into the chunk cache.
cudaError_t rebuildKeys(
    View const& view, int32_t layer, int32_t begin, int32_t end, int32_t multiprocessors, cudaStream_t stream);

// Partial attention over live tokens, outliers and hits: what needs no fetched value.
//   multiprocessors  that it may fill
//   isAfterRebuild   the kernel before on `stream` is rebuildKeys, with nothing in between: this one may start before
//                    that ends
cudaError_t attendResident(View const& view, int32_t layer, void const* q, int32_t begin, int32_t end,
    int32_t multiprocessors, bool isAfterRebuild, cudaStream_t stream);

// Partial attention over the missing chunks.
cudaError_t attendFetched(
    View const& view, int32_t layer, void const* q, int32_t begin, int32_t end, cudaStream_t stream);

// Merge of all of a row's partials by log-sum-exp.
//   out  device [batch, Hq D] T; zeros for a padding row
cudaError_t mergePartials(View const& view, void* out, int32_t begin, int32_t end, cudaStream_t stream);

} // namespace trtllm_shadowkv::kernels
