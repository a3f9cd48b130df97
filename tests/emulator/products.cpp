// Products of four warps: when they start and end, and that nobody touches what they work on meanwhile.
#include "machine.h"

#include <algorithm>

namespace emulator
{
namespace
{

// In registers whose sums are still to come: a NaN that no arithmetic leaves as it is.
constexpr uint32_t kNO_NUMBER = 0x7fa0dead;

void checkUntouched(Product const& product, char const* name, int line)
{
    for (uint32_t i = 0; i < product.count; ++i)
    {
        uint32_t found = 0;
        std::memcpy(&found, product.sums + i, 4);
        if (found != (product.isLate ? kNO_NUMBER : bitCast<uint32_t>(product.values[i])))
        {
            fail(cudaErrorLaunchFailure,
                "%s (line %d): sum %u of the product of line %d was written while it was under way", name, line, i,
                product.line);
        }
    }
}

void show(Product const& product)
{
    if (product.isLate)
    {
        for (uint32_t i = 0; i < product.count; ++i)
        {
            std::memcpy(product.sums + i, &kNO_NUMBER, 4);
        }
    }
    else
    {
        std::memcpy(product.sums, product.values, product.count * sizeof(float));
    }
}

// What the warp's products before this batch have read is free again.
void endReads(Machine& m, Warp& warp, uint32_t batch, int line)
{
    for (Reads const& reads : warp.reads)
    {
        for (size_t i = 0; reads.batch < batch && i < reads.addresses.size(); ++i)
        {
            uint32_t const address = reads.addresses[i];
            --m.pieces[address / 16].reads;
            if (std::memcmp(sharedPointer(address, 16, 16), &reads.bytes[i * 16], 16) != 0)
            {
                fail(cudaErrorLaunchFailure,
                    "waitForProducts (line %d): %s was written while the product of line %d could read it", line,
                    nameOf(address).c_str(), reads.line);
            }
        }
    }
    auto const isOver = [batch](Reads const& reads) { return reads.batch < batch; };
    warp.reads.erase(std::remove_if(warp.reads.begin(), warp.reads.end(), isOver), warp.reads.end());
}

} // namespace

void meetOnly(char const* name, int line)
{
    meet(combineNothing, 0xffffffffU, name, line);
}

void fenceForProducts()
{
    fiber().fence = ++machine().time;
}

void beginProducts(int line)
{
    meetOnly("beginProducts", line);
    fiber().hasBegun = true;
}

void startProduct(float* sums, Factors factors, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    if (!f.hasBegun)
    {
        fail(cudaErrorLaunchFailure, "startProduct (line %d) without beginProducts() before the batch", line);
    }
    auto const isSame = [sums](Product const& p) { return p.sums == sums; };
    auto at = std::find_if(f.products.begin(), f.products.end(), isSame);
    if (at == f.products.end())
    {
        at = f.products.insert(at, Product{});
        at->sums = sums;
        at->count = factors.rows / 2;
        std::memcpy(at->values, sums, at->count * sizeof(float));
    }
    else
    {
        checkUntouched(*at, "startProduct", line);
    }
    if (!factors.adds)
    {
        std::fill(at->values, at->values + at->count, 0.0F);
    }
    at->batch = f.batches;
    at->line = line;
    at->isLate = isLate(m);
    factors.sums = at->values;
    collective(combineProduct, 0xffffffffU, "startProduct", line, &factors, sizeof(factors), nullptr, 0);
    show(*at);
}

void commitProducts(int line)
{
    meetOnly("commitProducts", line);
    ++fiber().batches;
    fiber().hasBegun = false;
}

void waitForProducts(uint32_t pending, int line)
{
    Machine& m = machine();
    meetOnly("waitForProducts", line);
    Fiber& f = fiber();
    uint32_t const ended = f.batches > pending ? f.batches - pending : 0;
    auto const isOver = [ended](Product const& p) { return p.batch < ended; };
    if (std::none_of(f.products.begin(), f.products.end(), isOver))
    {
        return;
    }
    if (isLate(m))
    {
        f.state = State::kPRODUCTS;
        toScheduler();
    }
    endReads(m, m.warps[f.index / kLANES], ended, line);
    for (Product& product : f.products)
    {
        if (isOver(product))
        {
            checkUntouched(product, "waitForProducts", line);
            product.isLate = false;
            show(product);
        }
    }
    f.products.erase(std::remove_if(f.products.begin(), f.products.end(), isOver), f.products.end());
}

bool endProducts(Machine& m)
{
    for (uint32_t i = 0; i < m.threads; ++i)
    {
        if (m.fibers[i].state == State::kPRODUCTS) // one warp, no more than must
        {
            Fiber* const lanes = &m.fibers[i / kLANES * kLANES];
            for (uint32_t k = 0; k < kLANES; ++k)
            {
                if (lanes[k].state == State::kPRODUCTS)
                {
                    lanes[k].state = State::kREADY;
                }
            }
            return true;
        }
    }
    return false;
}

void checkProducts()
{
    if (!fiber().products.empty())
    {
        fail(cudaErrorLaunchFailure, "the thread ends before waitForProducts() for the product of line %d",
            fiber().products.front().line);
    }
}

} // namespace emulator
