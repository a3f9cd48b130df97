// findBasis for test_find_basis.py: a view and a seal of nothing but what it needs.
#include "kernels/context/seal_scratch.h"

#include <cstring>

using namespace trtllm_shadowkv::kernels;

// gram [layers, W, W], basis [layers, W, r] T: View::factorB of layers 1 to `layers` and sealed row 1; exact: the same
// before it was rounded. Returns a cudaError_t, or -1: something else was written to.
extern "C" __attribute__((visibility("default"))) int callFindBasis(float const* gram, int32_t heads, int32_t headSize,
    int32_t rank, int32_t layers, int32_t element, uint16_t* basis, float* exact)
{
    View view{};
    view.element = static_cast<Element>(element);
    view.layers = layers + 1;
    view.heads = view.kvHeads = heads;
    view.group = 1;
    view.headSize = headSize;
    view.chunkSize = 8;
    view.chunkShift = 3;
    view.rank = rank;
    view.slots = 1;
    view.sealedRows = 2;
    Seal seal{};
    seal.sealedRow = 1;
    seal.chunks = 7;
    seal.layerBegin = 1;
    seal.layerEnd = layers + 1;
    SealLayout const layout = sealLayout(view, seal.chunks);
    size_t const width = static_cast<size_t>(heads) * headSize;
    size_t const elements = width * rank;
    void* factorB = nullptr;
    cudaError_t error = cudaMalloc(&seal.scratch, layout.bytes * layers);
    error = error != cudaSuccess ? error : cudaMalloc(&factorB, view.layers * 2 * elements * sizeof(uint16_t));
    if (error != cudaSuccess)
    {
        return error;
    }
    view.factorB = factorB;
    char* const scratch = static_cast<char*>(seal.scratch);
    for (int32_t i = 0; i < layers; ++i)
    {
        std::memcpy(scratch + i * layout.bytes + layout.gram, gram + i * width * width, width * width * sizeof(float));
    }
    int result = findBasis(view, seal, nullptr);
    for (int32_t layer = 0; layer <= layers; ++layer)
    {
        uint16_t const* const rows = static_cast<uint16_t const*>(factorB) + layer * 2 * elements;
        size_t const untouched = layer == 0 ? 2 * elements : elements;
        for (size_t i = 0; i < untouched && result == cudaSuccess; ++i)
        {
            result = rows[i] == 0xffffU ? cudaSuccess : -1; // as memory is at first
        }
        if (layer > 0)
        {
            char const* const last = scratch + (layer - 1) * layout.bytes + layout.basis + elements * sizeof(float);
            std::memcpy(basis + (layer - 1) * elements, rows + elements, elements * sizeof(uint16_t));
            std::memcpy(exact + (layer - 1) * elements, last, elements * sizeof(float));
        }
    }
    cudaFree(seal.scratch);
    cudaFree(factorB);
    return result;
}
