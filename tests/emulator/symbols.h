// What the file that this code is in says of its kernels and of their shared memory, from its symbol table.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace emulator
{

struct Range // of the thread-local memory
{
    size_t offset;
    size_t bytes;
    bool isOwn; // of this kernel; else of a function that any kernel may call
};

struct Kernel
{
    std::string name;
    std::vector<Range> shared;
};

Kernel const& kernelAt(void const* address);

// Thread-local memory of this file in this thread: all shared memory, static and dynamic.
unsigned char* sharedBase();
size_t sharedBytes();

// Functions and lines of a call stack, as far as they lie in this file.
void printFrames(void* const* frames, int count);

// What cudaFuncSetAttribute allows a kernel of dynamic shared memory.
void askForShared(void const* kernel, size_t bytes);

// Why the last launch failed.
char const* lastMessage();

} // namespace emulator
