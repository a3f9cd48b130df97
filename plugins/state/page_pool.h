// Which pages, or rows, of a pool are free. Ids are handed out by the order of earlier calls alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trtllm_shadowkv
{

class PagePool
{
public:
    explicit PagePool(int32_t count) : mFree(static_cast<size_t>(count))
    {
        for (int32_t i = 0; i < count; ++i)
        {
            mFree[i] = count - 1 - i;
        }
    }

    int32_t free() const noexcept
    {
        return static_cast<int32_t>(mFree.size());
    }

    // `count` ids, at most free().
    std::vector<int32_t> take(int32_t count)
    {
        std::vector<int32_t> const taken(mFree.rbegin(), mFree.rbegin() + count);
        mFree.resize(mFree.size() - taken.size());
        return taken;
    }

    // Gives back what take returned. Never throws: there was room for the ids before they were taken.
    void give(std::vector<int32_t> const& ids) noexcept
    {
        mFree.insert(mFree.end(), ids.rbegin(), ids.rend());
    }

private:
    std::vector<int32_t> mFree; // the last one goes first
};

} // namespace trtllm_shadowkv
