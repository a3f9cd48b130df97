// Checks of arguments: each throws Failure (TSK_INVALID_ARGUMENT) that says what was found and what was expected.
#pragma once

#include "state/failure.h"

#include <cstdint>
#include <string>

namespace trtllm_shadowkv
{

inline void requireThat(bool holds, std::string const& found, std::string const& expected)
{
    if (!holds)
    {
        throw Failure(TSK_INVALID_ARGUMENT, found + "; expected " + expected);
    }
}

inline void requireRange(char const* name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
    {
        throw Failure(TSK_INVALID_ARGUMENT, std::string(name) + " is " + std::to_string(value) + "; expected "
                                                + std::to_string(low) + " to " + std::to_string(high));
    }
}

// A device address of `multiple`-byte pieces.
inline void requireAddress(char const* name, void const* address, uint64_t multiple)
{
    uint64_t const value = reinterpret_cast<uint64_t>(address);
    if (value == 0 || value % multiple != 0)
    {
        throw Failure(TSK_INVALID_ARGUMENT,
            std::string(name) + " is " + (value == 0 ? "null" : "address " + std::to_string(value))
                + "; expected a device address that is a multiple of " + std::to_string(multiple));
    }
}

} // namespace trtllm_shadowkv
