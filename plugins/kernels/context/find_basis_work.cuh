// Where the kernels of findBasis find their matrices, of one layer each.
#pragma once

#include "kernels/decode/view.h"

namespace trtllm_shadowkv::kernels
{

// Passed by value. Offsets in bytes from a layer's begin in the seal's scratch; blockIdx.z counts the layers.
struct BasisWork
{
    char* scratch;
    int64_t layerBytes;
    int64_t gram;   // G [width, width] float32
    int64_t first;  // Q [width, rank] float32
    int64_t second; // Y [width, rank] float32
    int64_t
        product; // [rank, rank] float64: Y^T Y, of which the lower triangle counts; then its Cholesky factor L, with
                 // the inverses of L's diagonal blocks in their place
    int64_t inverse; // [rank, rank] float32: the inverse of L^T
    int64_t bound;   // [1] float64: about the least of the eigenvalues that are looked for, of the shifted G
    int32_t width;   // H D, a multiple of 32
    int32_t rank;    // a multiple of 16
};

template <typename T>
__device__ __forceinline__ T* layerArray(BasisWork const& work, int64_t offset)
{
    return reinterpret_cast<T*>(work.scratch + blockIdx.z * work.layerBytes + offset);
}

} // namespace trtllm_shadowkv::kernels
