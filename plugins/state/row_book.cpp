#include "state/row_book.h"

#include "state/require.h"

#include <algorithm>
#include <string>
#include <utility>

namespace trtllm_shadowkv
{
namespace
{

using namespace kernels;

constexpr uint64_t kVALUE_ALIGNMENT = 16; // bytes: what a fetch reads at once

int32_t ceilDiv(int64_t a, int64_t b)
{
    return static_cast<int32_t>((a + b - 1) / b);
}

std::string nameOf(int32_t slot)
{
    return "slot " + std::to_string(slot);
}

void requireFree(PagePool const& pool, int32_t count, char const* what)
{
    if (count > pool.free())
    {
        throw Failure(TSK_OUT_OF_CAPACITY, std::to_string(pool.free()) + " free " + what + "; expected at least "
                                               + std::to_string(count)
                                               + ", which this row needs; release rows, or make the state larger");
    }
}

} // namespace

RowBook::RowBook(View const& sizes, SealRule const& rule, int32_t maxTokens)
    : mSizes(sizes), mRule(rule), mMaxTokens(maxTokens), mLive(sizes.livePages), mSealed(sizes.sealedPages),
      mSealedRows(sizes.sealedRows), mRows(static_cast<size_t>(sizes.slots))
{
}

void RowBook::requireSlot(int32_t slot) const
{
    requireRange("slot", slot, 0, mSizes.slots - 1);
}

void RowBook::requireRequest(RowRequest const& request, bool canSeal, int32_t leastStride) const
{
    requireRange("total_tokens", request.totalTokens, 1, mMaxTokens);
    requireRange("prompt_tokens", request.promptTokens, 1, request.totalTokens);
    requireRange("top_k", request.topK, 1, mSizes.topK);
    if (!canSeal)
    {
        return;
    }
    requireThat(request.valueAddresses != nullptr, "value_addresses is null",
        "a device address for each layer, because a row of " + std::to_string(request.totalTokens)
            + " tokens is sealed");
    requireRange("value_stride", request.valueStride, leastStride, kMAX_TOKENS);
    for (int32_t layer = 0; layer < mSizes.layers; ++layer)
    {
        std::string const name = "value_addresses[" + std::to_string(layer) + "]";
        requireAddress(name.c_str(), reinterpret_cast<void const*>(request.valueAddresses[layer]), kVALUE_ALIGNMENT);
    }
}

BookRow const& RowBook::allocate(int32_t slot, RowRequest const& request)
{
    requireSlot(slot);
    if (mRows[slot])
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " is in use; expected a free slot; release it first");
    }
    int64_t const total = request.totalTokens;
    bool const canSeal = !request.dense && total > mRule.denseLimit;
    // The chunk that leaves the window after the last token is sealed with it, though nobody will select it.
    int32_t const chunks = canSeal ? mRule.sealedChunks(total + 1) : 0;
    requireRequest(request, canSeal, chunks);

    int32_t const liveTokens = static_cast<int32_t>(
        canSeal ? std::max<int64_t>(request.promptTokens, std::min(total, mRule.denseLimit)) : total);
    int32_t const live = std::max(ceilDiv(liveTokens, kLIVE_PAGE_TOKENS), canSeal ? mRule.ring() : 0);
    int32_t const sealed = ceilDiv(int64_t{chunks} * mRule.chunkSize, kSEALED_PAGE_TOKENS);
    requireFree(mLive, live, "live pages");
    requireFree(mSealed, sealed, "sealed pages");
    requireFree(mSealedRows, canSeal ? 1 : 0, "sealed rows");

    BookRow row{};
    row.promptTokens = request.promptTokens;
    row.totalTokens = request.totalTokens;
    row.topK = request.topK;
    row.dense = request.dense;
    row.canSeal = canSeal;
    row.liveTokens = liveTokens;
    row.valueStride = canSeal ? request.valueStride : 0;
    row.livePages = mLive.take(live);
    row.sealedPages = mSealed.take(sealed);
    row.sealedRow = mSealedRows.take(canSeal ? 1 : 0);
    mRows[slot] = std::move(row);
    ++mUsed;
    return *mRows[slot];
}

BookRow const& RowBook::load(int32_t slot, int32_t length)
{
    BookRow& row = find(slot);
    requireRange("length", length, 1, row.liveTokens);
    if (row.sealed)
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " is sealed; expected a row that is not; release it first");
    }
    row.length = length;
    row.loaded = true;
    if (mustSeal(row))
    {
        cutDown(row);
    }
    return row;
}

BookRow const& RowBook::beginContext(int32_t slot, int32_t start, int32_t length)
{
    BookRow& row = find(slot);
    if (row.loaded)
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " has its whole prompt of " + std::to_string(row.length)
                                           + " tokens; expected one that has not");
    }
    requireRange("start", start, row.length, row.length);
    requireRange("length", length, 1, row.promptTokens - start);
    row.length += length;
    row.loaded = row.length == row.promptTokens;
    bool const promptSeals = row.canSeal && mRule.sealsAt(row.promptTokens);
    row.stored
        = promptSeals ? std::min(row.length / mRule.chunkSize, mRule.sealedChunks(int64_t{row.promptTokens} + 1)) : 0;
    return row;
}

BookRow const& RowBook::sealable(int32_t slot) const
{
    BookRow const& row = at(slot);
    if (!mustSeal(row))
    {
        std::string const why = row.sealed   ? " is sealed already"
                                : row.loaded ? " holds " + std::to_string(row.length) + " tokens and stays dense"
                                             : " has only a part of its prompt";
        throw Failure(
            TSK_WRONG_STATE, nameOf(slot) + why + "; expected a row that the next token takes over its dense limit");
    }
    return row;
}

BookRow const& RowBook::seal(int32_t slot)
{
    sealable(slot);
    BookRow& row = find(slot);
    cutDown(row);
    return row;
}

// Marks the row as sealed and gives back the live pages that hold nothing of its window.
void RowBook::cutDown(BookRow& row)
{
    int32_t const ring = mRule.ring();
    int32_t const published = mRule.sealedChunks(int64_t{row.length} + 1);
    int32_t const first = published * mRule.chunkSize / kLIVE_PAGE_TOKENS;
    int32_t const last = (row.length - 1) / kLIVE_PAGE_TOKENS;
    // Those of the window go where a ring looks for them, others fill it, the rest goes back.
    std::vector<int32_t> kept(static_cast<size_t>(ring), -1);
    std::vector<int32_t> others;
    for (int32_t i = 0; i < static_cast<int32_t>(row.livePages.size()); ++i)
    {
        if (i >= first && i <= last)
        {
            kept[i % ring] = row.livePages[i];
        }
        else
        {
            others.push_back(row.livePages[i]);
        }
    }
    size_t next = 0;
    for (int32_t& page : kept)
    {
        page = page < 0 ? others[next++] : page;
    }
    others.erase(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(next));
    row.livePages = std::move(kept);
    row.published = published;
    row.promptChunks = published;
    row.sealed = true;
    mLive.give(others);
}

void RowBook::release(int32_t slot)
{
    requireSlot(slot);
    if (!mRows[slot])
    {
        return;
    }
    mLive.give(mRows[slot]->livePages);
    mSealed.give(mRows[slot]->sealedPages);
    mSealedRows.give(mRows[slot]->sealedRow);
    mRows[slot].reset();
    --mUsed;
}

BookRow const& RowBook::at(int32_t slot) const
{
    requireSlot(slot);
    if (!mRows[slot])
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " is free; expected one that was allocated");
    }
    return *mRows[slot];
}

BookRow& RowBook::find(int32_t slot)
{
    return const_cast<BookRow&>(std::as_const(*this).at(slot));
}

void RowBook::requireStep(int32_t slot) const
{
    BookRow const& row = at(slot);
    if (!row.loaded)
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " is not loaded; expected a row whose tokens are in place");
    }
    if (row.length >= row.totalTokens)
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " holds " + std::to_string(row.length)
                                           + " tokens; expected fewer than its total of "
                                           + std::to_string(row.totalTokens));
    }
    if (mustSeal(row))
    {
        throw Failure(TSK_WRONG_STATE, nameOf(slot) + " holds " + std::to_string(row.length)
                                           + " tokens and its dense limit is " + std::to_string(mRule.denseLimit)
                                           + "; expected a sealed row; seal it first");
    }
}

void RowBook::beginGeneration(int32_t const* slots, int32_t batch)
{
    requireRange("batch", batch, 1, mSizes.maxBatch);
    std::vector<bool> seen(static_cast<size_t>(mSizes.slots), false);
    for (int32_t b = 0; b < batch; ++b)
    {
        if (slots[b] == -1)
        {
            continue;
        }
        requireStep(slots[b]);
        requireThat(!seen[slots[b]], nameOf(slots[b]) + " is twice in the batch", "each slot once");
        seen[slots[b]] = true;
    }
    for (int32_t b = 0; b < batch; ++b)
    {
        if (slots[b] == -1)
        {
            continue;
        }
        BookRow& row = *mRows[slots[b]];
        ++row.length;
        row.published = row.sealed ? mRule.sealedChunks(row.length) : 0;
    }
}

} // namespace trtllm_shadowkv
