// What runs launches: one machine, whose fibers are the threads of the running block.
#pragma once

#include "emulator.h"
#include "symbols.h"

#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace emulator
{

inline constexpr uint32_t kMAX_THREADS = 1024;
inline constexpr size_t kSTACK = 128 << 10; // address space; only what is touched takes memory
inline constexpr size_t kGUARD = 4 << 10;
inline constexpr size_t kMAX_SHARED = 227 << 10;
inline constexpr size_t kSHARED_WITHOUT_ASKING = 48 << 10;

enum class State
{
    kREADY,
    kWARP,  // waits for its warp
    kBLOCK, // waits for the block
    kENDED
};

struct Copy
{
    void* to;
    void const* from;
    uint32_t bytes;
    uint32_t zeros; // after them

    void now() const
    {
        if (bytes != 0)
        {
            std::memcpy(to, from, bytes);
        }
        std::memset(static_cast<unsigned char*>(to) + bytes, 0, zeros);
    }
};

struct Fiber
{
    uint3 threadIndex;
    uint32_t lane;
    void* stackPointer;
    State state;
    uint32_t index;
    std::vector<Copy> open;                // copies not yet committed
    std::vector<std::vector<Copy>> groups; // committed and not waited for
};

struct Warp
{
    Lanes in;
    Lanes out;
    uint32_t arrived;
    uint32_t ended;
    Combine combine;
    char const* name;
    int line;
    uint32_t firstLane;
};

struct Barrier
{
    uint32_t arrived;
    uint32_t ended;
    uint32_t firstThread;
    Vote vote;
    int line;
    int count;
    int result;
};

struct Machine
{
    std::mutex mutex;
    unsigned char* stacks{nullptr};
    unsigned char* signalStack{nullptr};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    uint32_t threads;
    Launch launch;
    void* scheduler; // stack pointer
    bool isRunning{false};
    bool hasFailed{false};
    cudaError_t error;
    std::string lastMessage;
    std::map<void const*, size_t> askedShared; // dynamic shared memory that cudaFuncSetAttribute allowed
    bool copiesEarly{false};
    bool copiesRandom{false};
    bool reversed{false};
    bool shuffled{false};
    std::mt19937 random;
};

extern Machine* const theMachine;
extern Fiber* running; // null between blocks

inline Machine& machine()
{
    return *theMachine;
}

inline Fiber& fiber()
{
    return *running;
}

// Runs the block until all its threads have ended, or the launch has failed.
void runBlock(Machine& m);

void toScheduler();

// Does what the fiber's copies of a group do.
void copyNow(std::vector<Copy>& copies);

// Fills the shared memory that the kernel can see with bytes 0xff, before a block.
void dirtySharedMemory(Kernel const& kernel);

// After a block: that nothing was written behind its dynamic shared memory.
void checkSharedMemory();

} // namespace emulator
