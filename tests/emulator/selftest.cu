// Checks of the emulator: its instructions against their definitions, and that each mistake is told. `selftest CASE`.
#include "kernels/decode/device.cuh"
#include "kernels/hopper.cuh"
#include "kernels/launch.cuh"

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace trtllm_shadowkv::kernels
{

// Runs the kernel of mistakes.cu that has this one; what became of its launch.
cudaError_t makeMistake(std::string const& name);

namespace
{

template <typename T>
T* device(size_t count)
{
    void* p = nullptr;
    cudaMalloc(&p, count * sizeof(T));
    return static_cast<T*>(p);
}

bool allRight = true;

void expect(bool condition, char const* what)
{
    if (!condition)
    {
        std::printf("wrong: %s\n", what);
        allRight = false;
    }
}

// --- instructions ---------------------------------------------------------------------------------------------------------

struct Tile
{
    alignas(16) uint16_t a[16][16];
    alignas(16) uint16_t b[16][8];
    float d[16][8];
};

template <typename T, bool kBY_LOADS>
__global__ void mmaKernel(Tile* tile)
{
    __shared__ Tile shared;
    uint32_t const lane = threadIdx.x;
    if (lane == 0)
    {
        shared = *tile;
    }
    __syncwarp();
    uint32_t const g = lane / 4;
    uint32_t const t = lane % 4 * 2;
    auto const two = [](uint16_t x, uint16_t y) { return uint32_t{x} | uint32_t{y} << 16; };
    uint32_t a[4] = {two(shared.a[g][t], shared.a[g][t + 1]), two(shared.a[g + 8][t], shared.a[g + 8][t + 1]),
        two(shared.a[g][t + 8], shared.a[g][t + 9]), two(shared.a[g + 8][t + 8], shared.a[g + 8][t + 9])};
    uint32_t b[2] = {two(shared.b[t][g], shared.b[t + 1][g]), two(shared.b[t + 8][g], shared.b[t + 9][g])};
    if constexpr (kBY_LOADS) // the same by other ways
    {
        loadMatrices(a, sharedAddress(&shared.a[lane % 16][lane / 16 * 8]));
        uint32_t r[4];
        loadTransposed(r, sharedAddress(&shared.b[lane % 16][0]));
        b[0] = r[0];
        b[1] = transpose8x8(transpose8x8(r[3]));
    }
    float d[4] = {shared.d[g][t], shared.d[g][t + 1], shared.d[g + 8][t], shared.d[g + 8][t + 1]};
    mma<T>(d, a[0], a[1], a[2], a[3], b[0], b[1]);
    tile->d[g][t] = d[0];
    tile->d[g][t + 1] = d[1];
    tile->d[g + 8][t] = d[2];
    tile->d[g + 8][t + 1] = d[3];
}

template <typename T, bool kBY_LOADS>
void checkMma()
{
    std::mt19937 random(7);
    Tile* const tile = device<Tile>(1);
    float a[16][16];
    float b[16][8];
    float d[16][8];
    auto const draw = [&](uint16_t& bits)
    {
        float const x = static_cast<float>(static_cast<int>(random() % 65)) / 8.0F - 4.0F; // exact, and so are sums
        bits = static_cast<uint16_t>(pack<T>(x, 0.0F));
        return x;
    };
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 16; ++j)
        {
            a[i][j] = draw(tile->a[i][j]);
        }
        for (int j = 0; j < 8; ++j)
        {
            b[i][j] = draw(tile->b[i][j]);
            d[i][j] = tile->d[i][j] = static_cast<float>(i * 8 + j);
        }
    }
    expect(launch(mmaKernel<T, kBY_LOADS>, 1, 32, 0, nullptr, tile) == cudaSuccess, "launch of mma");
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 8; ++j)
        {
            for (int k = 0; k < 16; ++k)
            {
                d[i][j] += a[i][k] * b[k][j];
            }
            expect(d[i][j] == tile->d[i][j], "mma");
        }
    }
}

__global__ void transposeKernel(uint32_t* out)
{
    uint32_t const row = threadIdx.x / 4;
    uint32_t const column = threadIdx.x % 4 * 2;
    out[threadIdx.x] = transpose8x8((row * 8 + column) | (row * 8 + column + 1) << 16);
}

__global__ void collectiveKernel(int32_t* out)
{
    int32_t const i = static_cast<int32_t>(threadIdx.x);
    int32_t* const to = out + i * 16;
    to[0] = __shfl_sync(kFULL_WARP, i, 5);
    to[1] = __shfl_up_sync(kFULL_WARP, i, 3);
    to[2] = __shfl_down_sync(kFULL_WARP, i, 3);
    to[3] = __shfl_xor_sync(kFULL_WARP, i, 9);
    to[4] = __shfl_xor_sync(kFULL_WARP, i, 5, 8);
    to[5] = __shfl_down_sync(kFULL_WARP, i, 3, 8);
    to[6] = static_cast<int32_t>(__ballot_sync(kFULL_WARP, i % 3 == 0));
    to[7] = __any_sync(kFULL_WARP, i == 40);
    to[8] = __all_sync(kFULL_WARP, i < 32);
    to[9] = static_cast<int32_t>(__reduce_add_sync(kFULL_WARP, static_cast<uint32_t>(i)));
    to[10] = __reduce_max_sync(kFULL_WARP, -i);
    to[11] = __syncthreads_count(i % 5 == 0);
    to[12] = static_cast<int32_t>(__match_any_sync(kFULL_WARP, i % 16));
    to[13] = __shfl_sync(kFULL_WARP, static_cast<double>(i), i + 1) == static_cast<double>((i + 1) % 32 + i / 32 * 32);
}

void checkCollectives()
{
    uint32_t* const words = device<uint32_t>(32);
    expect(launch(transposeKernel, 1, 32, 0, nullptr, words) == cudaSuccess, "launch of transpose");
    for (uint32_t i = 0; i < 32; ++i)
    {
        uint32_t const row = i / 4;
        uint32_t const column = i % 4 * 2;
        expect(words[i] == ((column * 8 + row) | ((column + 1) * 8 + row) << 16), "transpose8x8");
    }
    int32_t* const out = device<int32_t>(64 * 16);
    expect(launch(collectiveKernel, 1, 64, 0, nullptr, out) == cudaSuccess, "launch of collectives");
    for (int32_t i = 0; i < 64; ++i)
    {
        int32_t const first = i / 32 * 32;
        int32_t const lane = i % 32;
        int32_t const* const found = out + i * 16;
        uint32_t ballot = 0;
        int32_t sum = 0;
        for (int32_t j = 0; j < 32; ++j)
        {
            ballot |= ((first + j) % 3 == 0 ? 1U : 0U) << j;
            sum += first + j;
        }
        expect(found[0] == first + 5, "shfl");
        expect(found[1] == (lane < 3 ? i : i - 3), "shfl_up");
        expect(found[2] == (lane > 28 ? i : i + 3), "shfl_down");
        expect(found[3] == (i ^ 9), "shfl_xor");
        expect(found[4] == (i ^ 5), "shfl_xor of 8");
        expect(found[5] == (i % 8 > 4 ? i : i + 3), "shfl_down of 8");
        expect(found[6] == static_cast<int32_t>(ballot), "ballot");
        expect(found[7] == (first == 32), "any");
        expect(found[8] == (first == 0), "all");
        expect(found[9] == sum, "reduce_add");
        expect(found[10] == -first, "reduce_max");
        expect(found[11] == 13, "syncthreads_count");
        expect(found[12] == 0x10001 << lane % 16, "match_any");
        expect(found[13] == 1, "shfl of doubles");
    }
}

// Every thread of every block adds to the block's sum and to the grid's.
__global__ void sumKernel(uint32_t* sums, uint32_t* total)
{
    __shared__ uint32_t sum;
    uint32_t* const copies = dynamicShared<uint32_t>();
    uint32_t const i = threadIdx.x + threadIdx.y * blockDim.x;
    uint32_t const block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (i == 0)
    {
        expect(sum == 0xffffffffU && copies[0] == 0xffffffffU, "shared memory at first");
        sum = 0;
    }
    __syncthreads();
    atomicAdd(&sum, i);
    copies[blockDim.x * blockDim.y - 1 - i] = i;
    __syncthreads();
    if (i == 0)
    {
        sums[block] = sum;
    }
    atomicAdd(total, copies[i]);
}

void checkBlocks()
{
    uint32_t* const sums = device<uint32_t>(24);
    uint32_t* const total = device<uint32_t>(1);
    *total = 0;
    expect(launch(sumKernel, dim3(2, 3, 4), 96, 96 * 4, nullptr, sums, total) == cudaSuccess, "launch of sums");
    for (int i = 0; i < 24; ++i)
    {
        expect(sums[i] == 96 * 95 / 2, "sum of a block");
    }
    expect(*total == 24 * 96 * 95 / 2, "sum of a grid");
}

__global__ void copyKernel(uint4 const* from, uint4* to)
{
    uint4* const ring = dynamicShared<uint4>(); // of two tiles
    uint32_t const i = threadIdx.x;
    copyAsync<16>(sharedAddress(ring + i), from + i);
    commitCopies();
    for (uint32_t tile = 0; tile < 4; ++tile)
    {
        if (tile < 3)
        {
            copyAsyncPart(
                sharedAddress(ring + (tile + 1) % 2 * 64 + i), from + (tile + 1) * 64 + i, tile == 2 ? 4 : 16);
        }
        commitCopies();
        waitForCopies<1>();
        __syncthreads();
        to[tile * 64 + i] = ring[tile % 2 * 64 + 63 - i];
        __syncthreads();
    }
}

void checkCopies()
{
    uint4* const from = device<uint4>(256);
    uint4* const to = device<uint4>(256);
    for (uint32_t i = 0; i < 256; ++i)
    {
        from[i] = make_uint4(i, i + 1, i + 2, i + 3);
    }
    expect(launch(copyKernel, 1, 64, 2048, nullptr, from, to) == cudaSuccess, "launch of copies");
    for (uint32_t i = 0; i < 256; ++i)
    {
        uint32_t const x = i / 64 * 64 + 63 - i % 64;
        expect(to[i].x == x && to[i].w == (i < 192 ? x + 3 : 0), "copyAsync");
    }
}

// --- instructions of hopper.cuh -------------------------------------------------------------------------------------------

constexpr int32_t kDEPTH = 64; // k of a product

struct Factors
{
    uint16_t a[2 * 64][kDEPTH]; // of two warpgroups
    uint16_t b[128][kDEPTH];
    float d[2 * 64][128]; // in, and out
};

// d += A B^T, N of B's rows: both turned, or A in registers and B in units. The first sixteen k do not add where both are
// turned.
template <typename T, int32_t N, bool kTURNED>
__global__ void productKernel(Factors* factors)
{
    char* memory = dynamicShared<char>();
    expect(sharedAddress(memory) % 1024 == 16 && reinterpret_cast<uintptr_t>(memory) % 1024 == 16, "where it begins");
    memory += 1024 - 16;
    uint32_t const shared = sharedAddress(memory);
    uint32_t const group = threadIdx.x / kGROUP_THREADS;
    uint32_t const toB = shared + 2 * 64 * 128;
    for (uint32_t i = threadIdx.x; i < 128 * 8; i += blockDim.x)
    {
        uint32_t const row = i / 8;
        uint32_t const piece = i % 8;
        uint32_t const turned = row * 128 + (piece ^ row % 8) * 16;
        copyAsync<16>(shared + turned, &factors->a[row][piece * 8]);
        copyAsync<16>(toB + (kTURNED ? turned : piece * 128 * 16 + row * 16), &factors->b[row][piece * 8]);
    }
    commitCopies();
    waitForCopies<0>();
    fenceForProducts();
    __syncthreads();

    uint32_t const g = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    uint32_t const t = threadIdx.x % 4 * 2;
    auto const at = [&](uint32_t i) -> float& { return factors->d[g + i / 2 % 2 * 8][i / 4 * 8 + t + i % 2]; };
    float d[N / 2];
    for (uint32_t i = 0; i < N / 2; ++i)
    {
        d[i] = at(i);
    }
    auto const two
        = [](uint16_t const(&row)[kDEPTH], uint32_t k) { return uint32_t{row[k]} | uint32_t{row[k + 1]} << 16; };
    for (uint32_t s = 0; s < kDEPTH / 16; ++s)
    {
        beginProducts();
        if constexpr (kTURNED)
        {
            uint64_t const a = turnedMatrix(shared + group * 64 * 128 + s * 32);
            uint64_t const b = turnedMatrix(toB + s * 32);
            if (s == 0)
            {
                startProduct<T, false>(d, a, b);
            }
            else
            {
                startProduct<T, true>(d, a, b);
            }
        }
        else
        {
            auto const& a = factors->a;
            uint32_t const k = s * 16 + t;
            uint32_t const registers[4] = {two(a[g], k), two(a[g + 8], k), two(a[g], k + 8), two(a[g + 8], k + 8)};
            startProduct<T, N>(d, registers, unitMatrix(toB + s * 2 * 128 * 16, 128, 128 * 16));
        }
        commitProducts();
        if (s == 1)
        {
            waitForProducts<0>();
            settle(d);
        }
    }
    waitForProducts<0>();
    settle(d);
    for (uint32_t i = 0; i < N / 2; ++i)
    {
        at(i) = d[i];
    }
}

template <typename T, int32_t N, bool kTURNED>
void checkProduct()
{
    std::mt19937 random(9);
    Factors* const factors = device<Factors>(1);
    auto const draw = [&](uint16_t& bits)
    {
        float const x = static_cast<float>(static_cast<int>(random() % 33)) / 8.0F - 2.0F;
        bits = static_cast<uint16_t>(pack<T>(x, 0.0F));
        return x;
    };
    std::vector<float> a(128 * kDEPTH);
    std::vector<float> b(128 * kDEPTH);
    for (int i = 0; i < 128; ++i)
    {
        for (int k = 0; k < kDEPTH; ++k)
        {
            a[i * kDEPTH + k] = draw(factors->a[i][k]);
            b[i * kDEPTH + k] = draw(factors->b[i][k]);
        }
        for (int j = 0; j < 128; ++j)
        {
            factors->d[i][j] = kTURNED ? NAN : static_cast<float>(i + j);
        }
    }
    constexpr int32_t kBYTES = 1024 - 16 + 2 * 128 * 128;
    auto const kernel = productKernel<T, N, kTURNED>;
    expect(launch(kernel, 1, 256, kBYTES, nullptr, factors) == cudaSuccess, "launch of products");
    for (int i = 0; i < 128; ++i)
    {
        for (int j = 0; j < N; ++j)
        {
            float sum = kTURNED ? 0.0F : static_cast<float>(i + j);
            for (int k = 0; k < kDEPTH; ++k)
            {
                sum += a[i * kDEPTH + k] * b[j * kDEPTH + k];
            }
            expect(factors->d[i][j] == sum, "startProduct");
        }
    }
}

// Warps 0 to 3 copy tiles into a ring of two, the others add up what they read: in turns, and all tiles.
__global__ void ringKernel(uint32_t const* from, uint32_t* to, int32_t tiles)
{
    constexpr int32_t kSTAGES = 2;
    __shared__ uint64_t barriers[kSTAGES][2]; // it is there, it was read
    __shared__ uint4 ring[kSTAGES][128];
    __shared__ uint32_t order;
    if (threadIdx.x == 0)
    {
        for (auto& stage : barriers)
        {
            initBarrier(sharedAddress(&stage[0]), 128);
            initBarrier(sharedAddress(&stage[1]), 8);
        }
        order = 0;
    }
    __syncthreads();
    int32_t const group = static_cast<int32_t>(threadIdx.x) / kGROUP_THREADS;
    uint32_t const i = threadIdx.x % kGROUP_THREADS;
    if (group == 0)
    {
        shrinkRegisters<24>();
    }
    else
    {
        growRegisters<240>();
    }
    uint32_t sum = 0;
    for (int32_t tile = 0; tile < tiles; ++tile)
    {
        int32_t const stage = tile % kSTAGES;
        uint32_t const phase = static_cast<uint32_t>(tile / kSTAGES % 2);
        uint32_t const there = sharedAddress(&barriers[stage][0]);
        uint32_t const read = sharedAddress(&barriers[stage][1]);
        if (group == 0)
        {
            await(read, phase ^ 1);
            copyAsync<16>(sharedAddress(&ring[stage][i]), from + (tile * 128 + i) * 4);
            arriveWithCopies(there);
            continue;
        }
        await(there, phase);
        if (group == 1)
        {
            if (tile != 0)
            {
                meetAt<256>(1);
            }
            expect(order % 256 == 0, "turn of the first");
            meetAt<128>(3);
            atomicAdd(&order, 1);
            arriveAt<256>(2);
        }
        else
        {
            meetAt<256>(2);
            expect(order % 256 == 128, "turn of the second");
            meetAt<128>(4);
            atomicAdd(&order, 1);
            if (tile + 1 < tiles)
            {
                arriveAt<256>(1);
            }
        }
        sum += ring[stage][127 - i].x;
        __syncwarp();
        if (i % 32 == 0)
        {
            arrive(read);
        }
    }
    if (group != 0)
    {
        to[threadIdx.x - kGROUP_THREADS] = sum;
    }
}

void checkRing()
{
    constexpr int32_t kTILES = 7;
    uint32_t* const from = device<uint32_t>(kTILES * 128 * 4);
    uint32_t* const to = device<uint32_t>(256);
    for (uint32_t i = 0; i < kTILES * 128 * 4; ++i)
    {
        from[i] = i;
    }
    expect(launch(ringKernel, 2, 384, 0, nullptr, from, to, kTILES) == cudaSuccess, "launch of the ring");
    for (uint32_t i = 0; i < 256; ++i)
    {
        uint32_t sum = 0;
        for (uint32_t tile = 0; tile < kTILES; ++tile)
        {
            sum += (tile * 128 + 127 - i % 128) * 4;
        }
        expect(to[i] == sum, "sum of tiles");
    }
}

void checkNumbers()
{
    float const inf = HUGE_VALF;
    expect(pack<__half>(1.0F, -2.0F) == 0xc0003c00U && pack<__half>(65519.9F, 1e6F) == 0x7c007bffU, "pack of float16");
    expect(pack<__nv_bfloat16>(1.0F, -2.0F) == 0xc0003f80U, "pack of bfloat16");
    expect(pack<__nv_bfloat16>(1.00390625F, 1.01171875F) == 0x3f823f80U, "ties of bfloat16");
    expect(pack<__nv_bfloat16>(inf, NAN) == 0x7fff7f80U && pack<__half>(-inf, NAN) == 0x7ffffc00U, "pack of NaN, inf");
    expect(powerOfTwo(-inf) == 0.0F && powerOfTwo(3.0F) == 8.0F && powerOfTwo(-140.0F) == 0.0F, "powerOfTwo");
    expect(isnan(powerOfTwo(NAN)), "powerOfTwo of NaN");
    expect(halvesOfE4m3(0x7e38) == 0x5f003c00U, "e4m3"); // 1 and 448
    expect(__clz(0) == 32 && __clz(1) == 31 && __ffs(0) == 0 && __ffs(8) == 4 && __popc(255) == 8, "bits");
    expect(__byte_perm(0x33221100, 0x77665544, 0x7250) == 0x77225500U && __brev(1) == 0x80000000U, "bytes");
}

// --- all ------------------------------------------------------------------------------------------------------------------

int run(std::string const& name)
{
    if (name == "instructions")
    {
        checkMma<__half, false>();
        checkMma<__half, true>();
        checkMma<__nv_bfloat16, false>();
        checkMma<__nv_bfloat16, true>();
        checkCollectives();
        checkBlocks();
        checkCopies();
        checkProduct<__half, 128, true>();
        checkProduct<__nv_bfloat16, 128, true>();
        checkProduct<__half, 64, false>();
        checkProduct<__nv_bfloat16, 96, false>();
        checkProduct<__half, 128, false>();
        checkRing();
        checkNumbers();
        return allRight ? 0 : 1;
    }
    cudaError_t const error = makeMistake(name);
    // What failed leaves nothing behind.
    checkCollectives();
    std::printf("\n%s\n", cudaGetErrorName(error));
    return allRight ? 0 : 1;
}

} // namespace
} // namespace trtllm_shadowkv::kernels

int main(int count, char** arguments)
{
    return count == 2 ? trtllm_shadowkv::kernels::run(arguments[1]) : 2;
}
