#include "kernels/decode/rope_table.h"
#include "kernels/launch.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kTHREADS = 256;

// Rows 0 to units - 1 are turns, the kUNIT rows after them steps; a thread makes one (cos, sin).
__global__ void __launch_bounds__(kTHREADS) ropeTableKernel(
    float2* turns, float2* steps, float const* __restrict__ inverseFrequencies, int32_t units, int32_t half)
{
    int32_t const index = static_cast<int32_t>(blockIdx.x) * kTHREADS + static_cast<int32_t>(threadIdx.x);
    int32_t const row = index / half;
    int32_t const i = index - row * half;
    if (row >= units + kUNIT)
    {
        return;
    }
    bool const isTurn = row < units;
    int32_t const position = isTurn ? row * kUNIT : row - units;
    double sine;
    double cosine;
    sincos(position * static_cast<double>(inverseFrequencies[i]), &sine, &cosine);
    float2* const target = isTurn ? turns + index : steps + (row - units) * half + i;
    *target = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

} // namespace

cudaError_t fillRope(View const& view, float const* inverseFrequencies, int32_t tokens, cudaStream_t stream)
{
    if (tokens < 1 || tokens > kMAX_TOKENS)
    {
        return cudaErrorInvalidValue;
    }
    int32_t const units = (tokens + kUNIT - 1) / kUNIT;
    int32_t const half = view.headSize / 2;
    int32_t const blocks = ((units + kUNIT) * half + kTHREADS - 1) / kTHREADS; // of at most 2^25 entries
    return launch(ropeTableKernel, blocks, kTHREADS, 0, stream, reinterpret_cast<float2*>(view.ropeTurns),
        reinterpret_cast<float2*>(view.ropeSteps), inverseFrequencies, units, half);
}

} // namespace trtllm_shadowkv::kernels
