// Cholesky factor of findBasis's Y^T Y = L L^T and the inverse of L, in float64 and by panels of 32 columns.
#pragma once

#include "kernels/context/find_basis_work.cuh"
#include "kernels/ptx.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kFACTOR_THREADS = 256;
constexpr int32_t kPANEL = 32;   // columns
constexpr int32_t kPITCH = 34;   // float64 of a row in shared memory: 8 rows' 16 bytes meet no bank twice
constexpr int32_t kSTRIPE = 64;  // rows that a block factors at once
constexpr int32_t kCOLUMNS = 16; // of the inverse, of a block
constexpr int32_t kCOLUMN_PITCH = 18;
constexpr double kLEAST_PIVOT = 0x1p-46; // of the diagonal element before elimination; less is all rounding

using PanelRow = double[kPITCH];

struct FactorShared
{
    double rows[2][kSTRIPE][kPITCH]; // stage
    double panel[2][kPANEL][kPITCH]; // stage
    double stripe[kSTRIPE][kPITCH];  // of Y^T Y, less the product of the panels before
    double inverse[kPANEL][kPITCH];  // of the diagonal block of L
};

// Starts to copy rows [row, row + count) of panel `k` of L. Rows from beyond `rank` are copies of the last one.
__device__ __forceinline__ void copyPanel(
    double const* product, int32_t rank, int32_t row, int32_t count, int32_t k, PanelRow* to)
{
    constexpr int32_t kPIECES = kPANEL / 2;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count * kPIECES; i += kFACTOR_THREADS)
    {
        int32_t const column = k * kPANEL + i % kPIECES * 2;
        if (column < rank)
        {
            double const* const from = product + int64_t{min(row + i / kPIECES, rank - 1)} * rank + column;
            copyAsync<16>(sharedAddress(&to[i / kPIECES][i % kPIECES * 2]), from);
        }
    }
}

// By one warp: the inverse of the Cholesky factor of the block in the first `width` rows of `stripe`. Lane i has row i
// of it, then column i of the inverse. `whole`: the lane's diagonal element before elimination. A pivot that is too
// small for it, or NaN, becomes the least that is allowed, so that all stays finite. Returns the least pivot.
__device__ __forceinline__ double invertBlock(PanelRow const* stripe, int32_t width, double whole, PanelRow* inverse)
{
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    double row[kPANEL];
#pragma unroll
    for (int32_t k = 0; k < kPANEL; ++k)
    {
        double const value = stripe[lane][k];
        row[k] = lane < width && k < width ? value : (lane == k ? 1.0 : 0.0);
    }
    double least = INFINITY;
    double reciprocal = 0.0; // of the lane's diagonal element of L
#pragma unroll
    for (int32_t k = 0; k < kPANEL; ++k)
    {
        double const floor = kLEAST_PIVOT * __shfl_sync(kFULL_WARP, whole, k);
        double pivot = __shfl_sync(kFULL_WARP, row[k], k);
        if (!(pivot > floor))
        {
            pivot = floor > 0.0 ? floor : 1.0;
        }
        least = k < width ? fmin(least, pivot) : least;
        double const root = rsqrt(pivot);
        reciprocal = lane == k ? root : reciprocal;
        row[k] = lane > k ? row[k] * root : 0.0; // the diagonal is not needed any more
#pragma unroll
        for (int32_t j = k + 1; j < kPANEL; ++j)
        {
            row[j] -= row[k] * __shfl_sync(kFULL_WARP, row[k], j);
        }
    }
    double column[kPANEL];
#pragma unroll
    for (int32_t k = 0; k < kPANEL; ++k)
    {
        column[k] = lane == k ? 1.0 : 0.0;
    }
#pragma unroll
    for (int32_t k = 0; k < kPANEL; ++k)
    {
        column[k] *= __shfl_sync(kFULL_WARP, reciprocal, k);
        inverse[k][lane] = column[k];
#pragma unroll
        for (int32_t j = k + 1; j < kPANEL; ++j)
        {
            column[j] -= __shfl_sync(kFULL_WARP, row[k], j) * column[k];
        }
    }
    return least;
}

// sums[h][c] += the products of rows `row` + 32 h of `left` and rows `column` + 8 c of `right`.
__device__ __forceinline__ void multiplyPanels(
    PanelRow const* left, PanelRow const* right, int32_t row, int32_t column, double (&sums)[2][4])
{
#pragma unroll 4
    for (int32_t k = 0; k < kPANEL; k += 2)
    {
        double2 a[2];
#pragma unroll
        for (int32_t h = 0; h < 2; ++h)
        {
            a[h] = *reinterpret_cast<double2 const*>(&left[row + h * 32][k]);
        }
#pragma unroll
        for (int32_t c = 0; c < 4; ++c)
        {
            double2 const b = *reinterpret_cast<double2 const*>(&right[column + c * 8][k]);
#pragma unroll
            for (int32_t h = 0; h < 2; ++h)
            {
                sums[h][c] += a[h].x * b.x;
                sums[h][c] += a[h].y * b.y;
            }
        }
    }
}

// The Cholesky factor of a layer (z) by one block, panel after panel from the left, in the place of Y^T Y; the inverses
// of its diagonal blocks in theirs.
__global__ void __launch_bounds__(kFACTOR_THREADS)
    factorKernel(__grid_constant__ BasisWork const work, bool writesBound)
{
    FactorShared& shared = *dynamicShared<FactorShared>();
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const row = thread / 8;    // and row + 32, of a stripe
    int32_t const column = thread % 8; // and column + 8, 16, 24, of a panel
    int32_t const rank = work.rank;
    double* const product = layerArray<double>(work, work.product);
    double least = INFINITY;
    for (int32_t begin = 0; begin < rank; begin += kPANEL)
    {
        int32_t const panel = begin / kPANEL;
        int32_t const width = min(kPANEL, rank - begin);
        for (int32_t first = begin; first < rank; first += kSTRIPE)
        {
            double before[2][4];
#pragma unroll
            for (int32_t j = 0; j < 8; ++j)
            {
                int32_t const m = min(first + row + j / 4 * 32, rank - 1);
                int32_t const n = min(begin + column + j % 4 * 8, rank - 1);
                before[j / 4][j % 4] = product[int64_t{m} * rank + n];
            }
            double sums[2][4] = {};
            if (panel > 0)
            {
                copyPanel(product, rank, first, kSTRIPE, 0, shared.rows[0]);
                copyPanel(product, rank, begin, kPANEL, 0, shared.panel[0]);
                commitCopies();
            }
            for (int32_t k = 0; k < panel; ++k)
            {
                waitForCopies<0>();
                __syncthreads(); // the panel is here, and all are done with the one before
                if (k + 1 < panel)
                {
                    copyPanel(product, rank, first, kSTRIPE, k + 1, shared.rows[(k + 1) % 2]);
                    copyPanel(product, rank, begin, kPANEL, k + 1, shared.panel[(k + 1) % 2]);
                    commitCopies();
                }
                multiplyPanels(shared.rows[k % 2], shared.panel[k % 2], row, column, sums);
            }
#pragma unroll
            for (int32_t j = 0; j < 8; ++j)
            {
                shared.stripe[row + j / 4 * 32][column + j % 4 * 8] = before[j / 4][j % 4] - sums[j / 4][j % 4];
            }
            __syncthreads();
            if (first == begin)
            {
                if (thread < 32)
                {
                    double const whole = product[int64_t{min(begin + thread, rank - 1)} * (rank + 1)];
                    least = fmin(least, invertBlock(shared.stripe, width, whole, shared.inverse));
                }
                __syncthreads();
            }
            // Rows below the diagonal block: times the transpose of its inverse.
            double below[2][4] = {};
            multiplyPanels(shared.stripe, shared.inverse, row, column, below);
#pragma unroll
            for (int32_t j = 0; j < 8; ++j)
            {
                int32_t const m = first + row + j / 4 * 32;
                int32_t const n = begin + column + j % 4 * 8;
                if (m < rank && n < rank)
                {
                    product[int64_t{m} * rank + n]
                        = m < begin + kPANEL ? shared.inverse[m - begin][n - begin] : below[j / 4][j % 4];
                }
            }
            __syncthreads(); // all are done with the stripe, and what was written can be read
        }
    }
    if (writesBound && thread == 0)
    {
        *layerArray<double>(work, work.bound) = sqrt(least);
    }
}

struct InvertShared
{
    double tiles[2][kPANEL][kPITCH]; // stage
    double sums[kPANEL][kCOLUMN_PITCH];
    // then columns[rank, rounded up to whole panels][kCOLUMN_PITCH]
};

inline int32_t invertSharedBytes(int32_t rank)
{
    int32_t const rows = (rank + kPANEL - 1) / kPANEL * kPANEL;
    return static_cast<int32_t>(sizeof(InvertShared)) + rows * kCOLUMN_PITCH * static_cast<int32_t>(sizeof(double));
}

// The inverse of L^T in float32. A block makes kCOLUMNS columns of the inverse of L (x) of a layer (z), from their
// first panel of rows down: the inverse of the diagonal block times (the identity less L times the rows above).
__global__ void __launch_bounds__(kFACTOR_THREADS) invertKernel(__grid_constant__ BasisWork const work)
{
    InvertShared& shared = *dynamicShared<InvertShared>();
    double (*const columns)[kCOLUMN_PITCH] = reinterpret_cast<double (*)[kCOLUMN_PITCH]>(&shared + 1);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const row = thread / 8;        // of a panel
    int32_t const column = thread % 8 * 2; // and column + 1
    int32_t const rank = work.rank;
    int32_t const firstColumn = static_cast<int32_t>(blockIdx.x) * kCOLUMNS;
    int32_t const firstPanel = firstColumn / kPANEL;
    int32_t const panels = (rank + kPANEL - 1) / kPANEL;
    double const* const product = layerArray<double const>(work, work.product);
    copyPanel(product, rank, firstPanel * kPANEL, kPANEL, firstPanel, shared.tiles[0]);
    commitCopies();
    int32_t stage = 0;
    for (int32_t i = firstPanel; i < panels; ++i)
    {
        double2 sum = make_double2(0.0, 0.0);
        for (int32_t k = firstPanel; k <= i; ++k, stage ^= 1)
        {
            PanelRow const* const tile = shared.tiles[stage];
            bool const isLast = k == i; // the inverse of the diagonal block
            if (isLast)
            {
                int32_t const at = firstColumn - firstPanel * kPANEL + column;
                bool const isFirst = i == firstPanel;
                *reinterpret_cast<double2*>(&shared.sums[row][column])
                    = make_double2(isFirst && row == at ? 1.0 : -sum.x, isFirst && row == at + 1 ? 1.0 : -sum.y);
            }
            waitForCopies<0>();
            __syncthreads(); // the tile and the sums are here, and all are done with the tile before
            int32_t const nextPanel = isLast ? i + 1 : i;
            if (nextPanel < panels)
            {
                copyPanel(
                    product, rank, nextPanel * kPANEL, kPANEL, isLast ? firstPanel : k + 1, shared.tiles[stage ^ 1]);
                commitCopies();
            }
            double (*const right)[kCOLUMN_PITCH] = isLast ? shared.sums : columns + k * kPANEL;
            int32_t const depth = min(kPANEL, rank - k * kPANEL);
            double2 part = make_double2(0.0, 0.0);
#pragma unroll 4
            for (int32_t j = 0; j < depth; j += 2)
            {
                double2 const a = *reinterpret_cast<double2 const*>(&tile[row][j]);
                double2 const b0 = *reinterpret_cast<double2 const*>(&right[j][column]);
                double2 const b1 = *reinterpret_cast<double2 const*>(&right[j + 1][column]);
                part.x += a.x * b0.x;
                part.y += a.x * b0.y;
                part.x += a.y * b1.x;
                part.y += a.y * b1.y;
            }
            if (isLast)
            {
                *reinterpret_cast<double2*>(&columns[i * kPANEL + row][column]) = part;
            }
            else
            {
                sum.x += part.x;
                sum.y += part.y;
            }
        }
    }
    __syncthreads();
    float* const inverse = layerArray<float>(work, work.inverse);
    for (int32_t i = thread; i < kCOLUMNS * rank; i += kFACTOR_THREADS)
    {
        int32_t const c = i / rank;
        int32_t const r = i % rank;
        float const value = r < firstPanel * kPANEL ? 0.0F : static_cast<float>(columns[r][c]);
        inverse[int64_t{firstColumn + c} * rank + r] = value;
    }
}

} // namespace
} // namespace trtllm_shadowkv::kernels
