// Shared memory, which is thread-local memory of the file that this code is in, and copies to it.
#include "machine.h"

namespace emulator
{
namespace
{

constexpr size_t kRED_ZONE = 256; // behind dynamic shared memory, of bytes kRED
constexpr unsigned char kRED = 0xa5;

// Dynamic shared memory begins at a multiple of 16 bytes, and of no more.
constexpr size_t kBASE = 16;

alignas(1024) thread_local unsigned char memory[kBASE + kMAX_SHARED + kRED_ZONE];

unsigned char* dynamicShared()
{
    return memory + kBASE;
}

void land(Copy const& copy)
{
    Machine& m = machine();
    if (copy.bytes != 0)
    {
        std::memcpy(copy.to, copy.from, copy.bytes);
    }
    std::memset(static_cast<unsigned char*>(copy.to) + copy.bytes, 0, copy.zeros);
    if (copy.address / 16 < kPIECES)
    {
        Piece& piece = m.pieces[copy.address / 16];
        piece.time = ++m.time;
        piece.thread = static_cast<uint16_t>(copy.thread);
        --piece.copies;
    }
}

} // namespace

void dirtySharedMemory(Kernel const& kernel)
{
    std::memset(dynamicShared(), 0xff, machine().launch.sharedBytes);
    std::memset(dynamicShared() + machine().launch.sharedBytes, kRED, kRED_ZONE);
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
        if (dynamicShared()[m.launch.sharedBytes + i] != kRED)
        {
            fail(cudaErrorIllegalAddress, "dynamic shared memory was written past its end, at byte %zu of %zu",
                m.launch.sharedBytes + i, m.launch.sharedBytes);
        }
    }
}

void* dynamicMemory()
{
    return dynamicShared();
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
    if (p >= memory && p < memory + sizeof(memory) && (p < dynamicShared() || p + bytes > dynamicShared() + dynamic))
    {
        fail(cudaErrorIllegalAddress, "past the end of dynamic shared memory: byte %td of %zu",
            p - dynamicShared() + bytes, dynamic);
    }
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0)
    {
        fail(cudaErrorMisalignedAddress, "address of shared memory %08x is not a multiple of %u", address, alignment);
    }
    return p;
}

std::string nameOf(uint32_t address)
{
    unsigned char const* const p = sharedBase() + address;
    if (p >= memory && p < memory + sizeof(memory))
    {
        return "byte " + std::to_string(p - dynamicShared()) + " of dynamic shared memory";
    }
    return "byte " + std::to_string(address) + " of shared memory";
}

bool isLate(Machine& m)
{
    return !m.copiesEarly && !(m.copiesRandom && m.random() % 2 == 0);
}

void copyNow(std::vector<Copy>& copies)
{
    for (Copy const& copy : copies)
    {
        land(copy);
    }
    copies.clear();
}

void copyAllOf(Fiber& f)
{
    for (auto& group : f.groups)
    {
        copyNow(group);
    }
    f.groups.clear();
    copyNow(f.open);
}

void copyUntil(Fiber& f, uint64_t number)
{
    auto const until = [number](std::vector<Copy>& copies)
    {
        size_t count = 0;
        for (; count < copies.size() && copies[count].number <= number; ++count)
        {
            land(copies[count]);
        }
        copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(count));
    };
    for (auto& group : f.groups)
    {
        until(group);
    }
    until(f.open);
}

void copyAsync(uint32_t to, void const* from, uint32_t bytes, int32_t count)
{
    Machine& m = machine();
    if (count < 0 || count > static_cast<int32_t>(bytes))
    {
        fail(cudaErrorLaunchFailure, "copyAsync of %d of %u bytes", count, bytes);
    }
    uint32_t const copied = static_cast<uint32_t>(count);
    Fiber& f = fiber();
    Copy const copy{sharedPointer(to, bytes, bytes), from, copied, bytes - copied, to, f.index, ++f.copies};
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0)
    {
        fail(cudaErrorMisalignedAddress, "copyAsync of %u bytes from %p", bytes, from);
    }
    if (to / 16 < kPIECES)
    {
        Piece& piece = m.pieces[to / 16];
        if (piece.reads != 0)
        {
            fail(cudaErrorLaunchFailure, "copyAsync to %s, which a product of warp %u reads that was not waited for",
                nameOf(to).c_str(), piece.reader);
        }
        ++piece.copies;
    }
    if (isLate(m))
    {
        f.open.push_back(copy);
    }
    else
    {
        land(copy);
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
