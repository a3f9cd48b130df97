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
    kWARP,     // waits for its warp
    kBLOCK,    // waits for the block
    kPART,     // waits at a named barrier
    kPHASE,    // waits for the end of a barrier's phase
    kPRODUCTS, // waits for products, which end when nobody else can go on
    kENDED
};

struct Copy
{
    void* to;
    void const* from;
    uint32_t bytes;
    uint32_t zeros; // after them
    uint32_t address;
    uint32_t thread;
    uint64_t number; // of the thread's
};

// To come, at a barrier.
struct Arrival
{
    uint32_t barrier;
    uint64_t copies; // of the thread, before it
    int line;
};

inline constexpr uint32_t kMAX_SUMS = 64; // of a lane

// What a lane has of products that it has started and not waited for.
struct Product
{
    float* sums;
    uint32_t count;
    uint32_t batch; // the newest
    bool isLate;    // no numbers in `sums` yet
    int line;
    float values[kMAX_SUMS];
};

// What a warp's product reads of shared memory.
struct Reads
{
    uint32_t batch;
    int line;
    std::vector<uint32_t> addresses; // of pieces
    std::vector<unsigned char> bytes;
};

// 16 bytes of shared memory.
struct Piece
{
    uint64_t time;   // when a copy came here last
    uint16_t thread; // whose
    uint16_t copies; // to come
    uint16_t reads;  // by products that are under way
    uint16_t reader; // a warp that does
};

inline constexpr uint32_t kPIECES = (256 << 10) / 16; // as far as the names of matrices reach

struct Fiber
{
    uint3 threadIndex;
    uint32_t lane;
    void* stackPointer;
    State state;
    uint32_t index;
    std::vector<Copy> open;                // copies not yet committed
    std::vector<std::vector<Copy>> groups; // committed and not waited for
    uint64_t copies;                       // that it has started
    std::vector<Arrival> arrivals;
    uint32_t barrier; // that it waits at, or that barrier's id
    uint32_t parity;
    int line;
    std::vector<Product> products;
    uint32_t batches; // of products, committed
    bool hasBegun;    // products
    uint64_t fence;   // when
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
    std::vector<Reads> reads;
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

// Of 8 bytes in shared memory.
struct PhaseBarrier
{
    uint32_t expected; // arrivals of a phase
    uint32_t arrived;
    uint64_t phases; // that have ended
    uint32_t thread; // who made it
    uint64_t meeting;
    uint32_t unseen; // threads that waited for the last phase's end and have not gone on yet
    std::vector<uint32_t> waiters;
    std::vector<uint64_t> last; // of each thread, the phase that it arrived in last, counted from 1
};

struct PartBarrier
{
    uint32_t count;
    uint32_t arrived;
    uint32_t firstThread;
    int line;
    std::vector<uint32_t> perWarp; // that have arrived
    std::vector<bool> isHere;
};

inline constexpr uint32_t kPARTS = 16;

struct Machine
{
    std::mutex mutex;
    unsigned char* stacks{nullptr};
    unsigned char* signalStack{nullptr};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    std::map<uint32_t, PhaseBarrier> phaseBarriers; // by address
    PartBarrier parts[kPARTS];
    uint64_t meetings; // of all threads or a part, so far
    std::vector<Piece> pieces;
    uint64_t time{0}; // counts what `pieces` and fences tell apart
    uint64_t blockTime;
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

// The running fiber waits, and others go on.
void giveWay(Machine& m);

// Whether what may happen at once, or later, shall happen later.
bool isLate(Machine& m);

void copyNow(std::vector<Copy>& copies);
void copyAllOf(Fiber& f);

// Copies of the thread up to this number.
void copyUntil(Fiber& f, uint64_t number);

std::string nameOf(uint32_t address);

void clearBarriers(Machine& m);

// Arrivals that wait for copies, as many as let a thread go on; whether there was one.
bool letArrive(Machine& m);

// For who waits for products: whether there was somebody.
bool endProducts(Machine& m);

// Who waits at which barrier, for a report.
std::string waitersOf(Machine const& m);

// The running thread ends.
void checkProducts();

// Fills the shared memory that the kernel can see with bytes 0xff, before a block.
void dirtySharedMemory(Kernel const& kernel);

// After a block: that nothing was written behind its dynamic shared memory.
void checkSharedMemory();

} // namespace emulator
