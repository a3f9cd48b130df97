// The books of a state on the host: which row holds which slot and pages, and how far it has come. No CUDA.
#pragma once

#include "kernels/decode/view.h"
#include "state/page_pool.h"
#include "state/state_config.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace trtllm_shadowkv
{

// What a row is allocated for; see tsk_state_allocate.
struct RowRequest
{
    int32_t promptTokens;
    int32_t totalTokens;
    int32_t topK;
    bool dense;
    uint64_t const* valueAddresses; // [layers], or null
    int32_t valueStride;
};

struct BookRow
{
    int32_t promptTokens;
    int32_t totalTokens;
    int32_t topK;
    bool dense;
    bool canSeal;       // it grows beyond the dense limit
    int32_t liveTokens; // it holds at most, before it is sealed
    bool loaded{false};
    bool sealed{false};
    int32_t length{0};
    int32_t published{0};
    int32_t promptChunks{0};
    int32_t valueStride{0};
    int32_t stored{0};                // chunks whose values a context pass has brought to the value region
    std::vector<int32_t> livePages;   // page of token p: entry p / 128 % size
    std::vector<int32_t> sealedPages; // page of chunk c: entry c * C / 512
    std::vector<int32_t> sealedRow;   // one id, none where it cannot be sealed
};

// Every function that throws Failure leaves the books as they were.
class RowBook
{
public:
    RowBook(kernels::View const& sizes, SealRule const& rule, int32_t maxTokens);

    // Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE (slot in use), TSK_OUT_OF_CAPACITY.
    BookRow const& allocate(int32_t slot, RowRequest const& request);

    // Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE (nothing allocated, or sealed already).
    BookRow const& load(int32_t slot, int32_t length);

    // The next stretch of the row's prompt. Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE (nothing allocated, or
    // its prompt is done).
    BookRow const& beginContext(int32_t slot, int32_t start, int32_t length);

    // A row that may be sealed now. Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE (nothing allocated, its prompt
    // is not done, or it need not be sealed).
    BookRow const& sealable(int32_t slot) const;

    // Seals it: only the live pages of its window are left. Throws Failure: as sealable.
    BookRow const& seal(int32_t slot);

    // Throws Failure: TSK_INVALID_ARGUMENT. Nothing to do where the slot is free.
    void release(int32_t slot);

    // Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE (nothing allocated).
    BookRow const& at(int32_t slot) const;

    // Throws Failure: TSK_INVALID_ARGUMENT, TSK_WRONG_STATE.
    void beginGeneration(int32_t const* slots, int32_t batch);

    bool mustSeal(BookRow const& row) const noexcept
    {
        return row.loaded && row.canSeal && !row.sealed && mRule.sealsAt(row.length);
    }

    // Slots in use.
    int32_t used() const noexcept
    {
        return mUsed;
    }

private:
    void requireSlot(int32_t slot) const;
    void requireRequest(RowRequest const& request, bool canSeal, int32_t leastStride) const;
    BookRow& find(int32_t slot);
    void cutDown(BookRow& row);
    void requireStep(int32_t slot) const;

    kernels::View mSizes;
    SealRule mRule;
    int32_t mMaxTokens;
    PagePool mLive;
    PagePool mSealed;
    PagePool mSealedRows;
    std::vector<std::optional<BookRow>> mRows; // [slots]
    int32_t mUsed{0};
};

} // namespace trtllm_shadowkv
