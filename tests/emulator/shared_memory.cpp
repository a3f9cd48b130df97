// Shared memory, which is thread-local memory of the file that this code is in, and copies to it.
#include "machine.h"

namespace emulator
{
namespace
{

constexpr size_t kRED_ZONE = 256; // behind dynamic shared memory, of bytes kRED
constexpr unsigned char kRED = 0xa5;

alignas(1024) thread_local unsigned char dynamicShared[kMAX_SHARED + kRED_ZONE];

} // namespace

void dirtySharedMemory(Kernel const& kernel)
{
    std::memset(dynamicShared, 0xff, machine().launch.sharedBytes);
    std::memset(dynamicShared + machine().launch.sharedBytes, kRED, kRED_ZONE);
    for (Range const& range : kernel.shared)
    {
        std::memset(sharedBase() + range.offset, 0xff, range.bytes);
    }
}

void checkSharedMemory()
{
    Machine const& m = machine();
    for (size_t i = 0; i < kRED_ZONE; ++i)
    {
        if (dynamicShared[m.launch.sharedBytes + i] != kRED)
        {
            fail(cudaErrorIllegalAddress, "dynamic shared memory was written past its end, at byte %zu of %zu",
                m.launch.sharedBytes + i, m.launch.sharedBytes);
        }
    }
}

void* dynamicMemory()
{
    return dynamicShared;
}

uint32_t sharedAddress(void const* pointer)
{
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(sharedBase()));
}

void* sharedPointer(uint32_t address, uint32_t bytes, uint32_t alignment)
{
    if (address + size_t{bytes} > sharedBytes())
    {
        fail(cudaErrorIllegalAddress, "not an address of shared memory: %08x", address);
    }
    unsigned char* const p = sharedBase() + address;
    size_t const dynamic = machine().launch.sharedBytes;
    if (p >= dynamicShared && p < dynamicShared + sizeof(dynamicShared) && p + bytes > dynamicShared + dynamic)
    {
        fail(cudaErrorIllegalAddress, "past the end of dynamic shared memory: byte %zu of %zu",
            static_cast<size_t>(p - dynamicShared) + bytes, dynamic);
    }
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0)
    {
        fail(cudaErrorMisalignedAddress, "address of shared memory %08x is not a multiple of %u", address, alignment);
    }
    return p;
}

void copyNow(std::vector<Copy>& copies)
{
    for (Copy const& copy : copies)
    {
        copy.now();
    }
    copies.clear();
}

void copyAsync(uint32_t to, void const* from, uint32_t bytes, int32_t count)
{
    Machine& m = machine();
    if (count < 0 || count > static_cast<int32_t>(bytes))
    {
        fail(cudaErrorLaunchFailure, "copyAsync of %d of %u bytes", count, bytes);
    }
    uint32_t const copied = static_cast<uint32_t>(count);
    Copy const copy{sharedPointer(to, bytes, bytes), from, copied, bytes - copied};
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
    {
        fail(cudaErrorMisalignedAddress, "copyAsync of %u bytes from %p", bytes, from);
    }
    if (m.copiesEarly || (m.copiesRandom && m.random() % 2 == 0))
    {
        copy.now();
    }
    else
    {
        fiber().open.push_back(copy);
    }
}

void commitCopies()
{
    Fiber& f = fiber();
    f.groups.emplace_back();
    f.groups.back().swap(f.open);
}

void waitForCopies(uint32_t pending)
{
    Fiber& f = fiber();
    while (f.groups.size() > pending)
    {
        copyNow(f.groups.front());
        f.groups.erase(f.groups.begin());
    }
}

} // namespace emulator
