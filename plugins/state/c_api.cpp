#include "state/c_api.h"

#include "state/device.h"
#include "state/failure.h"
#include "state/link.h"

#include <cstdio>
#include <exception>
#include <future>
#include <string>

namespace
{

using trtllm_shadowkv::Failure;

// A fixed array: writing the message must not itself fail for want of memory.
thread_local char lastError[1024] = "";

tsk_status fail(tsk_status status, char const* message) noexcept
{
    std::snprintf(lastError, sizeof(lastError), "%s", message);
    return status;
}

// Runs `body` and turns what it throws into a status and a message.
template <typename Body>
tsk_status guarded(Body&& body) noexcept
{
    lastError[0] = '\0';
    try
    {
        body();
        return TSK_OK;
    }
    catch (Failure const& failure)
    {
        return fail(failure.status(), failure.what());
    }
    catch (std::exception const& exception)
    {
        return fail(TSK_SYSTEM_ERROR, exception.what());
    }
    catch (...)
    {
        return fail(TSK_SYSTEM_ERROR, "unknown exception");
    }
}

void requirePointer(void const* pointer, char const* name)
{
    if (pointer == nullptr)
    {
        throw Failure(TSK_INVALID_ARGUMENT, std::string(name) + " is null; expected the address of the result");
    }
}

} // namespace

char const* tsk_version(void)
{
    return TSK_VERSION;
}

char const* tsk_last_error(void)
{
    return lastError;
}

tsk_status tsk_device_count(int32_t* count)
{
    return guarded(
        [&]
        {
            requirePointer(count, "count");
            *count = trtllm_shadowkv::deviceCount();
        });
}

tsk_status tsk_device_info(int32_t device, tsk_device* info)
{
    return guarded(
        [&]
        {
            requirePointer(info, "info");
            *info = trtllm_shadowkv::deviceInfo(device);
        });
}

tsk_status tsk_measure_link(int32_t device, int64_t chunk_bytes, int64_t footprint_bytes, double* gigabytes_per_second)
{
    return guarded(
        [&]
        {
            requirePointer(gigabytes_per_second, "gigabytes_per_second");
            // In a thread of its own: the current device belongs to the thread, and putting the caller's back would
            // create a context on a device that it may never have used.
            *gigabytes_per_second
                = std::async(std::launch::async, trtllm_shadowkv::measureLink, device, chunk_bytes, footprint_bytes)
                      .get();
        });
}
