// Warp-wide instructions of ptx.cuh.
#include "kernels/ptx.cuh"

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

} // namespace

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
