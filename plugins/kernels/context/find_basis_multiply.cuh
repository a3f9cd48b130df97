// Products of findBasis: [width, k] times [k, rank] in float32, and Y^T Y in float64.
#pragma once

#include "kernels/context/find_basis_work.cuh"
#include "kernels/ptx.cuh"

namespace trtllm_shadowkv::kernels
{
namespace
{

constexpr int32_t kPRODUCT_THREADS = 256;

// --- float32 ---------------------------------------------------------------------------------------------------------

constexpr int32_t kTILE_ROWS = 128;
constexpr int32_t kSTEP = 16;                  // of k
constexpr int32_t kROW_PITCH = kTILE_ROWS + 4; // floats; column by column copies of Y then meet no bank twice
constexpr int32_t kUNIT_COLUMNS = 32;          // a thread has two columns of each unit of a tile
constexpr int32_t kMAX_UNITS = 5;

// Units of a tile for `rank` columns: the fewest steps, where a tile costs one more than it has units.
inline int32_t tileUnits(int32_t rank)
{
    int32_t best = 1;
    int32_t bestCost = INT32_MAX;
    for (int32_t units = 1; units <= kMAX_UNITS; ++units)
    {
        int32_t const tiles = (rank + units * kUNIT_COLUMNS - 1) / (units * kUNIT_COLUMNS);
        if (tiles * (units + 1) <= bestCost)
        {
            best = units;
            bestCost = tiles * (units + 1);
        }
    }
    return best;
}

// One stage of shared memory: rows of the left operand's transpose, and of the right operand.
template <int32_t kUNITS>
struct ProductStage
{
    float left[kSTEP][kROW_PITCH];
    float right[kSTEP][kUNITS * kUNIT_COLUMNS];
};

// Starts to copy step k of both operands. Nothing is copied from beyond `width` and `rank`.
template <int32_t kUNITS, bool kIS_GRAM>
__device__ __forceinline__ void copyStep(BasisWork const& work, float const* left, float const* right, int32_t firstRow,
    int32_t firstColumn, int32_t k, ProductStage<kUNITS>& stage)
{
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    if constexpr (kIS_GRAM) // symmetric: row k is column k
    {
        constexpr int32_t kPIECES = kTILE_ROWS / 4; // of a row
        for (int32_t i = thread; i < kSTEP * kPIECES; i += kPRODUCT_THREADS)
        {
            int32_t const row = i % kPIECES * 4;
            if (firstRow + row < work.width)
            {
                float const* const from = left + int64_t{k + i / kPIECES} * work.width + firstRow + row;
                copyAsync<16>(sharedAddress(&stage.left[i / kPIECES][row]), from);
            }
        }
    }
    else // transposed on the way: 8 columns of 4 rows a warp
    {
        for (int32_t i = thread; i < kSTEP * kTILE_ROWS; i += kPRODUCT_THREADS)
        {
            int32_t const row = i / 64 * 4 + i / 8 % 4;
            int32_t const column = i / 32 % 2 * 8 + i % 8;
            if (firstRow + row < work.width)
            {
                float const* const from = left + int64_t{firstRow + row} * work.rank + k + column;
                copyAsync<4>(sharedAddress(&stage.left[column][row]), from);
            }
        }
    }
    constexpr int32_t kPIECES = kUNITS * kUNIT_COLUMNS / 4;
    for (int32_t i = thread; i < kSTEP * kPIECES; i += kPRODUCT_THREADS)
    {
        int32_t const column = i % kPIECES * 4;
        if (firstColumn + column < work.rank)
        {
            float const* const from = right + int64_t{k + i / kPIECES} * work.rank + firstColumn + column;
            copyAsync<16>(sharedAddress(&stage.right[i / kPIECES][column]), from);
        }
    }
}

// kIS_GRAM: Y = G Q - node * bound * Q, from `from` to `to`. Else Q = Y M with M the inverse of L^T, upper triangular.
// A block makes a tile of kTILE_ROWS rows (x) and kUNITS * kUNIT_COLUMNS columns (y) of a layer (z), a thread 8 rows.
template <int32_t kUNITS, bool kIS_GRAM>
__global__ void __launch_bounds__(kPRODUCT_THREADS, 2)
    multiplyKernel(__grid_constant__ BasisWork const work, int64_t from, int64_t to, double node)
{
    __shared__ __align__(16) ProductStage<kUNITS> stages[2];
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const firstRow = static_cast<int32_t>(blockIdx.x) * kTILE_ROWS;
    int32_t const firstColumn = static_cast<int32_t>(blockIdx.y) * kUNITS * kUNIT_COLUMNS;
    float const* const given = layerArray<float const>(work, from);
    float const* const left = kIS_GRAM ? layerArray<float const>(work, work.gram) : given;
    float const* const right = kIS_GRAM ? given : layerArray<float const>(work, work.inverse);
    int32_t const lastColumn = firstColumn + kUNITS * kUNIT_COLUMNS;
    int32_t const depth = kIS_GRAM ? work.width : min(work.rank, lastColumn);
    if (firstRow + kTILE_ROWS > work.width || lastColumn > work.rank)
    {
        // What lies beyond is never copied.
        for (int32_t i = thread; i < static_cast<int32_t>(sizeof(stages) / 16); i += kPRODUCT_THREADS)
        {
            reinterpret_cast<uint4*>(stages)[i] = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
    }
    int32_t const row = thread / 16 * 4;    // and row + 1 to 3, and as many kTILE_ROWS / 2 further
    int32_t const column = thread % 16 * 2; // and column + 1, of each unit
    float2 sums[8][kUNITS] = {};
    copyStep<kUNITS, kIS_GRAM>(work, left, right, firstRow, firstColumn, 0, stages[0]);
    commitCopies();
    for (int32_t k = 0; k < depth; k += kSTEP)
    {
        ProductStage<kUNITS> const& stage = stages[k / kSTEP % 2];
        waitForCopies<0>();
        __syncthreads(); // the step is here, and all are done with the one before
        if (k + kSTEP < depth)
        {
            copyStep<kUNITS, kIS_GRAM>(
                work, left, right, firstRow, firstColumn, k + kSTEP, stages[(k / kSTEP + 1) % 2]);
            commitCopies();
        }
#pragma unroll
        for (int32_t i = 0; i < kSTEP; ++i)
        {
            float4 const low = *reinterpret_cast<float4 const*>(&stage.left[i][row]);
            float4 const high = *reinterpret_cast<float4 const*>(&stage.left[i][row + kTILE_ROWS / 2]);
            float const a[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int32_t unit = 0; unit < kUNITS; ++unit)
            {
                float2 const b = *reinterpret_cast<float2 const*>(&stage.right[i][unit * kUNIT_COLUMNS + column]);
#pragma unroll
                for (int32_t j = 0; j < 8; ++j)
                {
                    sums[j][unit].x += a[j] * b.x;
                    sums[j][unit].y += a[j] * b.y;
                }
            }
        }
    }
    float shift = 0.0F;
    if (kIS_GRAM && node != 0.0) // else nobody has written the bound
    {
        shift = static_cast<float>(node * *layerArray<double const>(work, work.bound));
    }
    float* const result = layerArray<float>(work, to);
#pragma unroll
    for (int32_t j = 0; j < 8; ++j)
    {
        int32_t const m = firstRow + row + j / 4 * (kTILE_ROWS / 2) + j % 4;
#pragma unroll
        for (int32_t unit = 0; unit < kUNITS; ++unit)
        {
            int32_t const n = firstColumn + unit * kUNIT_COLUMNS + column;
            if (m < work.width && n < work.rank)
            {
                int64_t const at = int64_t{m} * work.rank + n;
                float2 sum = sums[j][unit];
                if (shift != 0.0F)
                {
                    float2 const q = *reinterpret_cast<float2 const*>(given + at);
                    sum.x -= shift * q.x;
                    sum.y -= shift * q.y;
                }
                *reinterpret_cast<float2*>(result + at) = sum;
            }
        }
    }
}

// --- float64 ---------------------------------------------------------------------------------------------------------

constexpr int32_t kSQUARE = 32;                                // rows and columns of a block's tile of Y^T Y
constexpr int32_t kGROUPS = 4;                                 // threads of a group add up every fourth 8 rows of Y
constexpr int32_t kGROUP_THREADS = kPRODUCT_THREADS / kGROUPS; // 4 x 4 sums each

// Y^T Y: products of float32 are exact in float64. A block makes a tile (x), not above the diagonal, of a layer (z).
__global__ void __launch_bounds__(kPRODUCT_THREADS) squareKernel(__grid_constant__ BasisWork const work, int64_t from)
{
    __shared__ __align__(16) double rows[2][2][kSQUARE][kSQUARE]; // stage, operand
    static_assert(sizeof(rows) == kGROUPS * kSQUARE * kSQUARE * sizeof(double));
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t tile = static_cast<int32_t>(blockIdx.x);
    int32_t tileRow = 0;
    while (tile > tileRow)
    {
        ++tileRow;
        tile -= tileRow;
    }
    int32_t const first[2] = {tileRow * kSQUARE, tile * kSQUARE};
    float const* const y = layerArray<float const>(work, from);
    int32_t const loadRow = thread / 8;
    int32_t const loadColumn = thread % 8 * 4;
    float4 loaded[2];
    auto const load = [&](int32_t w)
    {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
        {
            int32_t const column = first[i] + loadColumn;
            loaded[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
            if (column < work.rank)
            {
                loaded[i] = *reinterpret_cast<float4 const*>(y + int64_t{w + loadRow} * work.rank + column);
            }
        }
    };
    int32_t const group = thread / kGROUP_THREADS;
    int32_t const row = thread % kGROUP_THREADS / 8 * 2; // and row + 1, and both 16 further; columns likewise
    int32_t const column = thread % 8 * 2;
    double sums[4][4] = {};
    load(0);
    for (int32_t w = 0; w < work.width; w += kSQUARE)
    {
        auto& stage = rows[w / kSQUARE % 2];
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
        {
            double2* const target = reinterpret_cast<double2*>(&stage[i][loadRow][loadColumn]);
            target[0] = make_double2(loaded[i].x, loaded[i].y);
            target[1] = make_double2(loaded[i].z, loaded[i].w);
        }
        __syncthreads(); // the rows are here, and all are done with the ones before
        if (w + kSQUARE < work.width)
        {
            load(w + kSQUARE);
        }
#pragma unroll
        for (int32_t i = 0; i < kSQUARE / kGROUPS; ++i)
        {
            double const* const left = stage[0][group * (kSQUARE / kGROUPS) + i];
            double const* const right = stage[1][group * (kSQUARE / kGROUPS) + i];
            double2 const a0 = *reinterpret_cast<double2 const*>(left + row);
            double2 const a1 = *reinterpret_cast<double2 const*>(left + row + kSQUARE / 2);
            double2 const b0 = *reinterpret_cast<double2 const*>(right + column);
            double2 const b1 = *reinterpret_cast<double2 const*>(right + column + kSQUARE / 2);
            double const a[4] = {a0.x, a0.y, a1.x, a1.y};
            double const b[4] = {b0.x, b0.y, b1.x, b1.y};
#pragma unroll
            for (int32_t j = 0; j < 16; ++j)
            {
                sums[j / 4][j % 4] += a[j / 4] * b[j % 4];
            }
        }
    }
    __syncthreads(); // all are done with the rows
    double* const partials = &rows[0][0][0][0];
#pragma unroll
    for (int32_t j = 0; j < 16; ++j)
    {
        int32_t const r = row + j / 8 * (kSQUARE / 2) + j / 4 % 2;
        int32_t const c = column + j % 4 / 2 * (kSQUARE / 2) + j % 2;
        partials[(group * kSQUARE + r) * kSQUARE + c] = sums[j / 4][j % 4];
    }
    __syncthreads();
    double* const product = layerArray<double>(work, work.product);
    for (int32_t i = thread; i < kSQUARE * kSQUARE; i += kPRODUCT_THREADS)
    {
        double sum = partials[i];
#pragma unroll
        for (int32_t other = 1; other < kGROUPS; ++other)
        {
            sum += partials[other * kSQUARE * kSQUARE + i];
        }
        int32_t const r = first[0] + i / kSQUARE;
        int32_t const c = first[1] + i % kSQUARE;
        if (r < work.rank && c < work.rank)
        {
            product[int64_t{r} * work.rank + c] = sum;
        }
    }
}

} // namespace
} // namespace trtllm_shadowkv::kernels
