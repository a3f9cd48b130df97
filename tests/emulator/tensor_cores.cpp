// Warp-wide instructions of ptx.cuh and hopper.cuh.
#include "kernels/ptx.cuh"
#include "machine.h"

#include <algorithm>
#include <vector>

namespace emulator
{
namespace
{

float const* halves() // as float32, by their bits
{
    static std::vector<float> const values = []
    {
        std::vector<float> v(65536);
        for (uint32_t i = 0; i < v.size(); ++i)
        {
            __half_raw raw;
            raw.x = static_cast<uint16_t>(i);
            v[i] = __half2float(__half(raw));
        }
        return v;
    }();
    return values.data();
}

template <bool kF16>
float element(uint32_t word, uint32_t k)
{
    uint32_t const bits = k == 0 ? word & 0xffffU : word >> 16;
    return kF16 ? halves()[bits] : bitCast<float>(bits << 16);
}

// Products are exact in float32; sums are float32 in the order of k. (avx2 brings no fused operations.)
__attribute__((target_clones("avx2", "default"), optimize("O3"))) void addProducts(
    float (&d)[16][8], float const (&a)[16][16], float const (&b)[16][8])
{
    for (uint32_t i = 0; i < 16; ++i)
    {
        for (uint32_t k = 0; k < 16; ++k)
        {
            for (uint32_t j = 0; j < 8; ++j)
            {
                d[i][j] += a[i][k] * b[k][j];
            }
        }
    }
}

constexpr uint32_t kMAX_ROWS = 128;

__attribute__((target_clones("avx2", "default"), optimize("O3"))) void addWideProducts(
    float (&d)[16][kMAX_ROWS], float const (&a)[16][16], float const (&b)[16][kMAX_ROWS], uint32_t rows)
{
    for (uint32_t i = 0; i < 16; ++i)
    {
        for (uint32_t k = 0; k < 16; ++k)
        {
            for (uint32_t j = 0; j < rows; ++j)
            {
                d[i][j] += a[i][k] * b[k][j];
            }
        }
    }
}

template <bool kF16>
void combineMma(Lanes const& in, Lanes& out)
{
    float a[16][16];
    float b[16][8];
    float d[16][8];
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        auto const x = valueOf<MmaOperands>(in, lane);
        uint32_t const g = lane / 4;
        uint32_t const t = lane % 4 * 2;
        for (uint32_t i = 0; i < 2; ++i)
        {
            a[g][t + i] = element<kF16>(x.a[0], i);
            a[g + 8][t + i] = element<kF16>(x.a[1], i);
            a[g][t + 8 + i] = element<kF16>(x.a[2], i);
            a[g + 8][t + 8 + i] = element<kF16>(x.a[3], i);
            b[t + i][g] = element<kF16>(x.b[0], i);
            b[t + 8 + i][g] = element<kF16>(x.b[1], i);
            d[g][t + i] = x.d[i];
            d[g + 8][t + i] = x.d[2 + i];
        }
    }
    addProducts(d, a, b);
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        uint32_t const g = lane / 4;
        uint32_t const t = lane % 4 * 2;
        float const result[4] = {d[g][t], d[g][t + 1], d[g + 8][t], d[g + 8][t + 1]};
        std::memcpy(out[lane], result, sizeof(result));
    }
}

template <bool kTRANSPOSED>
void combineLoad(Lanes const& in, Lanes& out)
{
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        uint32_t r[4];
        for (uint32_t m = 0; m < 4; ++m)
        {
            auto const at = [&](uint32_t row, uint32_t column)
            {
                uint16_t v;
                std::memcpy(&v, static_cast<char const*>(valueOf<void*>(in, m * 8 + row)) + column * 2, 2);
                return uint32_t{v};
            };
            uint32_t const g = lane / 4;
            uint32_t const t = lane % 4 * 2;
            r[m] = kTRANSPOSED ? at(t, g) | at(t + 1, g) << 16 : at(g, t) | at(g, t + 1) << 16;
        }
        std::memcpy(out[lane], r, sizeof(r));
    }
}

// Where 8 k of a row are, of the matrix that turnedMatrix() or unitMatrix() has named.
uint32_t pieceAt(uint64_t matrix, uint32_t row, uint32_t piece)
{
    auto const field = [matrix](uint32_t bit) { return static_cast<uint32_t>(matrix >> bit & 0x3fffU) << 4; };
    if (matrix >> 62 == 0)
    {
        return field(0) + row / 8 * field(32) + row % 8 * 16 + piece * field(16);
    }
    uint32_t const straight = field(0) + row / 8 * field(32) + row % 8 * 128 + piece * 16;
    return straight ^ (straight >> 7 & 7U) << 4;
}

// The piece, which a product of the running warp has begun to read.
void const* read(uint32_t address, uint64_t fence, Reads& reads)
{
    Machine& m = machine();
    void const* const p = sharedPointer(address, 16, 16);
    Piece& piece = m.pieces[address / 16];
    if (piece.copies != 0)
    {
        fail(cudaErrorLaunchFailure,
            "startProduct (line %d) reads %s, where copies that were not waited for are to come", reads.line,
            nameOf(address).c_str());
    }
    if (piece.time > m.blockTime && piece.time > fence && piece.time > m.fibers[piece.thread].fence)
    {
        fail(cudaErrorLaunchFailure,
            "startProduct (line %d) reads %s, which thread %u has copied: no fenceForProducts() since it came",
            reads.line, nameOf(address).c_str(), piece.thread);
    }
    ++piece.reads;
    piece.reader = static_cast<uint16_t>(fiber().index / kLANES);
    auto const* const bytes = static_cast<unsigned char const*>(p);
    reads.addresses.push_back(address);
    reads.bytes.insert(reads.bytes.end(), bytes, bytes + 16);
    return p;
}

template <bool kF16>
void multiply(Lanes const& in, Reads& reads)
{
    auto const first = valueOf<Factors>(in, 0);
    uint32_t const warp = fiber().index / kLANES;
    uint64_t fence = UINT64_MAX;
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        fence = std::min(fence, machine().fibers[warp * kLANES + i].fence);
    }
    float a[16][16];
    float b[16][kMAX_ROWS];
    float d[16][kMAX_ROWS];
    auto const put = [&](uint64_t matrix, uint32_t row, auto const& to)
    {
        for (uint32_t piece = 0; piece < 2; ++piece)
        {
            uint32_t words[4];
            std::memcpy(words, read(pieceAt(matrix, row, piece), fence, reads), 16);
            for (uint32_t k = 0; k < 8; ++k)
            {
                to(piece * 8 + k) = element<kF16>(words[k / 2], k % 2);
            }
        }
    };
    for (uint32_t row = 0; row < first.rows; ++row)
    {
        put(first.b, row, [&](uint32_t k) -> float& { return b[k][row]; });
    }
    for (uint32_t row = 0; row < 16 && !first.hasRegisters; ++row)
    {
        put(first.a, warp % 4 * 16 + row, [&](uint32_t k) -> float& { return a[row][k]; });
    }
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        auto const x = valueOf<Factors>(in, lane);
        uint32_t const g = lane / 4;
        uint32_t const t = lane % 4 * 2;
        for (uint32_t i = 0; i < 4 && first.hasRegisters; ++i)
        {
            a[g + i % 2 * 8][t + i / 2 * 8] = element<kF16>(x.registers[i], 0);
            a[g + i % 2 * 8][t + i / 2 * 8 + 1] = element<kF16>(x.registers[i], 1);
        }
        for (uint32_t i = 0; i < first.rows / 2; ++i)
        {
            d[g + i / 2 % 2 * 8][i / 4 * 8 + t + i % 2] = x.sums[i];
        }
    }
    addWideProducts(d, a, b, first.rows);
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        float* const sums = valueOf<Factors>(in, lane).sums;
        for (uint32_t i = 0; i < first.rows / 2; ++i)
        {
            sums[i] = d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
        }
    }
}

} // namespace

void combineProduct(Lanes const& in, Lanes&)
{
    Machine& m = machine();
    uint32_t const warp = fiber().index / kLANES;
    auto const first = valueOf<Factors>(in, 0);
    for (uint32_t i = 1; i < kLANES; ++i)
    {
        auto const x = valueOf<Factors>(in, i);
        if (x.b != first.b || x.rows != first.rows || x.hasRegisters != first.hasRegisters || x.isHalf != first.isHalf
            || x.adds != first.adds || (!first.hasRegisters && x.a != first.a))
        {
            fail(cudaErrorLaunchFailure, "startProduct (line %d): lanes 0 and %u name different matrices",
                m.warps[warp].line, i);
        }
    }
    Reads reads{m.fibers[warp * kLANES].batches, m.warps[warp].line, {}, {}};
    if (first.isHalf)
    {
        multiply<true>(in, reads);
    }
    else
    {
        multiply<false>(in, reads);
    }
    m.warps[warp].reads.push_back(std::move(reads));
}

void combineMmaF16(Lanes const& in, Lanes& out)
{
    combineMma<true>(in, out);
}

void combineMmaBF16(Lanes const& in, Lanes& out)
{
    combineMma<false>(in, out);
}

void combineTranspose(Lanes const& in, Lanes& out)
{
    for (uint32_t lane = 0; lane < kLANES; ++lane)
    {
        auto const at = [&](uint32_t row, uint32_t column)
        { return valueOf<uint32_t>(in, row * 4 + column / 2) >> column % 2 * 16 & 0xffffU; };
        uint32_t const g = lane / 4;
        uint32_t const t = lane % 4 * 2;
        setValue(out, lane, at(t, g) | at(t + 1, g) << 16);
    }
}

void combineLoadMatrices(Lanes const& in, Lanes& out)
{
    combineLoad<false>(in, out);
}

void combineLoadTransposed(Lanes const& in, Lanes& out)
{
    combineLoad<true>(in, out);
}

} // namespace emulator
