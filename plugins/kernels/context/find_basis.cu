#include "kernels/context/find_basis_factor.cuh"
#include "kernels/context/find_basis_multiply.cuh"
#include "kernels/context/seal.cuh"
#include "kernels/decode/device.cuh"
#include "kernels/launch.cuh"

// B spans the columns of p(G) Q: Q is orthonormal and the same for every prompt, and p a polynomial of degree kSTEPS,
// one root after another, with Q made orthonormal after each. The first kPLAIN roots are 0 (power iteration); then the
// least pivot tells about how large the eigenvalues are that are just wanted, and the other roots are those of the
// Chebyshev polynomial on the range below, where p is then small. Eight products do what power iteration does in about
// twelve. Of what the best B captures, B lost 6e-5 or less of SmolLM2's keys (one prompt), and 3e-4 where 1024
// eigenvalues fall as 1 / i and r = 160; with few columns it may lose more (2.8e-3 at r = 16 of 256).
//
// Q is made orthonormal by the Cholesky factor of Y^T Y = L L^T, Q = Y L^-T; at the end twice. G is shifted by kSHIFT
// of its trace so that Y has full rank where G has not. Less than 2^-22 does not do: what float32 leaves of the largest
// eigenvector in the other columns would grow from step to step.
namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kSTEPS = 8;
constexpr int32_t kPLAIN = 3; // after two the pivot may still say too much
constexpr float kSHIFT = 0x1p-20F;
constexpr float kLEAST_SHIFT = 0x1p-100F;
constexpr double kBELOW = 0.9; // the range of the roots, of what the pivot says
// (1 + cos(pi (2 k - 1) / 10)) / 2, ascending
constexpr double kROOTS[kSTEPS - kPLAIN]
    = {0.024471741852423234, 0.2061073738537635, 0.5, 0.7938926261462366, 0.9755282581475768};

constexpr int32_t kTHREADS = 256;
constexpr float kPI = 3.14159265F;

// Whether row i of Q changes sign: the cosines are then no match for anything that keys have in them.
__device__ __forceinline__ bool isNegative(uint32_t i)
{
    i *= 0x9e3779b1U;
    i ^= i >> 15;
    i *= 0x85ebca77U;
    i ^= i >> 13;
    i *= 0xc2b2ae3dU;
    return (i >> 31) != 0;
}

// Shifts G (block 0 of a layer), and writes Q (the others): columns of the cosine transform.
__global__ void __launch_bounds__(kTHREADS) startKernel(__grid_constant__ BasisWork const work)
{
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const width = work.width;
    if (blockIdx.x == 0)
    {
        __shared__ double sums[kTHREADS];
        float* const gram = layerArray<float>(work, work.gram);
        double sum = 0.0;
        for (int32_t i = thread; i < width; i += kTHREADS)
        {
            sum += gram[int64_t{i} * (width + 1)];
        }
        sums[thread] = sum;
        __syncthreads();
        double trace = 0.0;
        for (int32_t i = 0; i < kTHREADS; ++i)
        {
            trace += sums[i];
        }
        float shift = kSHIFT * static_cast<float>(trace);
        shift = shift > kLEAST_SHIFT && shift < INFINITY ? shift : 1.0F;
        for (int32_t i = thread; i < width; i += kTHREADS)
        {
            gram[int64_t{i} * (width + 1)] += shift;
        }
        return;
    }
    float* const q = layerArray<float>(work, work.first);
    float const scale = sqrtf(2.0F / static_cast<float>(width));
    int32_t const stride = (static_cast<int32_t>(gridDim.x) - 1) * kTHREADS;
    for (int32_t i = (static_cast<int32_t>(blockIdx.x) - 1) * kTHREADS + thread; i < width * work.rank; i += stride)
    {
        int32_t const row = i / work.rank;
        int32_t const column = i % work.rank;
        int32_t const turn = (2 * row + 1) * column % (4 * width); // of 4 width
        float const value
            = column == 0 ? sqrtf(0.5F) : cosf(kPI * static_cast<float>(turn) / static_cast<float>(2 * width));
        q[i] = isNegative(static_cast<uint32_t>(row)) ? -scale * value : scale * value;
    }
}

// View::factorB from float32.
template <typename T>
__global__ void __launch_bounds__(kTHREADS) roundKernel(
    __grid_constant__ View const view, __grid_constant__ BasisWork const work, int32_t layerBegin, int32_t sealedRow)
{
    int32_t const layer = layerBegin + static_cast<int32_t>(blockIdx.z);
    float4 const* const from = layerArray<float4 const>(work, work.second);
    T* const factorB
        = static_cast<T*>(view.factorB) + sealedHead(view, layer, sealedRow, 0) * view.headSize * view.rank;
    int32_t const i = static_cast<int32_t>(blockIdx.x) * kTHREADS + static_cast<int32_t>(threadIdx.x);
    if (i < work.width * work.rank / 4)
    {
        float4 const value = from[i];
        reinterpret_cast<uint2*>(factorB)[i] = make_uint2(pack<T>(value.x, value.y), pack<T>(value.z, value.w));
    }
}

// The launches of one layer range, in their order; the first failure stops all.
struct Launches
{
    BasisWork work;
    uint32_t layers;
    cudaStream_t stream;
    cudaError_t error;

    template <typename... P, typename... A>
    void add(void (*kernel)(P...), int32_t x, int32_t y, int32_t threads, int32_t bytes, A const&... arguments)
    {
        if (error == cudaSuccess)
        {
            dim3 const grid(static_cast<uint32_t>(x), static_cast<uint32_t>(y), layers);
            error = launch(kernel, grid, threads, bytes, stream, work, arguments...);
        }
    }

    template <int32_t kUNITS, bool kIS_GRAM>
    void addProduct(int64_t from, int64_t to, double node)
    {
        constexpr int32_t kTILE_COLUMNS = kUNITS * kUNIT_COLUMNS;
        add(multiplyKernel<kUNITS, kIS_GRAM>, (work.width + kTILE_ROWS - 1) / kTILE_ROWS,
            (work.rank + kTILE_COLUMNS - 1) / kTILE_COLUMNS, kPRODUCT_THREADS, 0, from, to, node);
    }

    template <bool kIS_GRAM>
    void multiply(int64_t from, int64_t to, double node)
    {
        switch (tileUnits(work.rank))
        {
        case 1:
            return addProduct<1, kIS_GRAM>(from, to, node);
        case 2:
            return addProduct<2, kIS_GRAM>(from, to, node);
        case 3:
            return addProduct<3, kIS_GRAM>(from, to, node);
        case 4:
            return addProduct<4, kIS_GRAM>(from, to, node);
        default:
            return addProduct<kMAX_UNITS, kIS_GRAM>(from, to, node);
        }
    }

    // `to`: the columns of `from`, made orthonormal.
    void orthonormalise(int64_t from, int64_t to, bool writesBound)
    {
        int32_t const squares = (work.rank + kSQUARE - 1) / kSQUARE;
        add(squareKernel, squares * (squares + 1) / 2, 1, kPRODUCT_THREADS, 0, from);
        add(factorKernel, 1, 1, kFACTOR_THREADS, static_cast<int32_t>(sizeof(FactorShared)), writesBound);
        add(invertKernel, work.rank / kCOLUMNS, 1, kFACTOR_THREADS, invertSharedBytes(work.rank));
        multiply<false>(from, to, 0.0);
    }
};

} // namespace

cudaError_t findBasis(View const& view, Seal const& seal, cudaStream_t stream)
{
    if (!isValid(view, seal))
    {
        return cudaErrorInvalidValue;
    }
    SealLayout const layout = sealLayout(view, seal.chunks);
    int64_t const elements = int64_t{view.rank} * view.rank;
    BasisWork work{};
    work.scratch = static_cast<char*>(seal.scratch);
    work.layerBytes = layout.bytes;
    work.width = view.kvHeads * view.headSize;
    work.rank = view.rank;
    work.gram = layout.gram;
    work.first = layout.basis;
    work.second = layout.basis + int64_t{4} * work.width * work.rank;
    work.product = layout.products;
    work.inverse = work.product + 8 * elements;
    work.bound = work.inverse + 4 * elements;
    int32_t const layers = seal.layerEnd - seal.layerBegin;
    Launches all{work, static_cast<uint32_t>(layers), stream, cudaSuccess};
    int32_t const items = work.width * work.rank;
    all.add(startKernel, 1 + std::min((items + kTHREADS - 1) / kTHREADS, 64), 1, kTHREADS, 0);
    for (int32_t step = 0; step < kSTEPS; ++step)
    {
        double const node = step < kPLAIN ? 0.0 : kBELOW * kROOTS[step - kPLAIN];
        all.multiply<true>(work.first, work.second, node);
        all.orthonormalise(work.second, work.first, step == kPLAIN - 1);
    }
    all.orthonormalise(work.first, work.second, false);
    if (all.error != cudaSuccess)
    {
        return all.error;
    }
    dim3 const grid(static_cast<uint32_t>((items / 4 + kTHREADS - 1) / kTHREADS), 1, static_cast<uint32_t>(layers));
    auto const kernel = view.element == Element::kF16 ? roundKernel<__half> : roundKernel<__nv_bfloat16>;
    return launch(kernel, grid, kTHREADS, 0, stream, view, work, seal.layerBegin, seal.sealedRow);
}

} // namespace trtllm_shadowkv::kernels
