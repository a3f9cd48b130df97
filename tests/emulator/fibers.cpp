// Launches: blocks one after the other, threads of a block as fibers, their barriers, collectives and shared memory.
#include "emulator.h"
#include "symbols.h"

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <execinfo.h>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

// Saves the running fiber's registers on its stack, its stack pointer in *from, and goes on with another's.
extern "C" void emulatorSwitch(void** from, void* to);
asm(R"(
    .text
    .hidden emulatorSwitch
    .type emulatorSwitch, @function
emulatorSwitch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulatorSwitch, . - emulatorSwitch
)");

namespace emulator
{

namespace
{

constexpr uint32_t kMAX_THREADS = 1024;
constexpr size_t kSTACK = 128 << 10; // address space; only what is touched takes memory
constexpr size_t kGUARD = 4 << 10;
constexpr size_t kMAX_SHARED = 227 << 10;
constexpr size_t kSHARED_WITHOUT_ASKING = 48 << 10;
constexpr size_t kRED_ZONE = 256; // behind dynamic shared memory, of bytes kRED
constexpr unsigned char kRED = 0xa5;

alignas(1024) thread_local unsigned char dynamicShared[kMAX_SHARED + kRED_ZONE];

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
    std::map<void const*, size_t> askedShared;
    bool copiesEarly{false};
    bool copiesRandom{false};
    bool reversed{false};
    bool shuffled{false};
    std::mt19937 random;
};

Machine* const theMachine = new Machine; // never destroyed: there may be launches in static destructors

Machine& machine()
{
    return *theMachine;
}

Fiber* running = nullptr;

Fiber& fiber()
{
    return *running;
}

void readEnvironment(Machine& m)
{
    char const* const copies = std::getenv("TSK_EMULATED_COPIES");
    m.copiesEarly = copies != nullptr && std::strcmp(copies, "early") == 0;
    m.copiesRandom = copies != nullptr && std::strcmp(copies, "random") == 0;
    char const* const order = std::getenv("TSK_EMULATED_ORDER");
    m.reversed = order != nullptr && std::strcmp(order, "reverse") == 0;
    m.shuffled = order != nullptr && std::strncmp(order, "random", 6) == 0;
    m.random.seed(m.shuffled ? static_cast<uint32_t>(std::atoi(order + 6)) : 1U);
}

void resume(Machine& m, Fiber& f)
{
    running = &f;
    threadIdx = f.threadIndex;
    emulatorSwitch(&m.scheduler, f.stackPointer);
    running = nullptr;
}

void toScheduler()
{
    emulatorSwitch(&fiber().stackPointer, machine().scheduler);
}

// The running fiber waits: on with another one of its warp, which is what the scheduler would do, or with the scheduler.
void giveWay(Machine& m)
{
    Fiber& from = fiber();
    if (!m.reversed && !m.shuffled)
    {
        Fiber* const lanes = &m.fibers[from.index - from.lane];
        for (uint32_t i = 1; i < kLANES; ++i)
        {
            Fiber& to = lanes[(from.lane + i) % kLANES];
            if (to.state == State::kREADY)
            {
                running = &to;
                threadIdx = to.threadIndex;
                emulatorSwitch(&from.stackPointer, to.stackPointer);
                return;
            }
        }
    }
    toScheduler();
}

void copyNow(std::vector<Copy>& copies)
{
    for (Copy const& copy : copies)
    {
        copy.now();
    }
    copies.clear();
}

void fiberMain()
{
    Machine& m = machine();
    m.launch.invoke(m.launch.arguments);
    Fiber& f = fiber();
    for (auto& group : f.groups)
    {
        copyNow(group);
    }
    f.groups.clear();
    copyNow(f.open);
    Warp& warp = m.warps[f.index / kLANES];
    ++warp.ended;
    ++m.barrier.ended;
    f.state = State::kENDED;
    if (warp.arrived != 0)
    {
        fail(cudaErrorLaunchFailure, "the thread ends while lane %u of its warp waits in %s (line %d)", warp.firstLane,
            warp.name, warp.line);
    }
    if (m.barrier.arrived != 0)
    {
        fail(cudaErrorLaunchFailure, "the thread ends while thread %u waits in __syncthreads (line %d)",
            m.barrier.firstThread, m.barrier.line);
    }
    toScheduler();
    std::abort(); // nobody resumes it
}

void prepare(Machine& m, Fiber& f, uint32_t index)
{
    f.index = index;
    f.threadIndex.x = index % m.launch.block.x;
    f.threadIndex.y = index / m.launch.block.x % m.launch.block.y;
    f.threadIndex.z = index / (m.launch.block.x * m.launch.block.y);
    f.lane = index % kLANES;
    f.state = State::kREADY;
    f.open.clear();
    f.groups.clear();
    // Not all at the same place of a page: they would push each other out of the cache.
    unsigned char* const top = m.stacks + (index + 1) * (kSTACK + kGUARD) - index % kLANES * 1088;
    void** p = reinterpret_cast<void**>(top) - 8;
    p[6] = reinterpret_cast<void*>(&fiberMain); // after six registers: where `ret` goes
    p[7] = nullptr;                             // fiberMain finds the stack as after a call
    std::fill(p, p + 6, nullptr);
    f.stackPointer = p;
}

void dirtySharedMemory(Machine const& m, Kernel const& kernel)
{
    std::memset(dynamicShared, 0xff, m.launch.sharedBytes);
    std::memset(dynamicShared + m.launch.sharedBytes, kRED, kRED_ZONE);
    for (Range const& range : kernel.shared)
    {
        std::memset(sharedBase() + range.offset, 0xff, range.bytes);
    }
}

// Runs the block until all its threads have ended.
void runBlock(Machine& m)
{
    uint32_t const warps = m.threads / kLANES;
    m.barrier = Barrier{};
    for (Warp& warp : m.warps)
    {
        warp.arrived = warp.ended = 0;
    }
    for (uint32_t i = 0; i < m.threads; ++i)
    {
        prepare(m, m.fibers[i], i);
    }
    std::vector<uint32_t> order(warps);
    for (uint32_t i = 0; i < warps; ++i)
    {
        order[i] = m.reversed ? warps - 1 - i : i;
    }
    uint32_t lanes[kLANES];
    for (uint32_t i = 0; i < kLANES; ++i)
    {
        lanes[i] = m.reversed ? kLANES - 1 - i : i;
    }
    while (m.barrier.ended != m.threads)
    {
        bool hasRun = false;
        if (m.shuffled)
        {
            std::shuffle(order.begin(), order.end(), m.random);
        }
        for (uint32_t w : order)
        {
            for (bool again = true; again;)
            {
                again = false;
                if (m.shuffled)
                {
                    std::shuffle(lanes, lanes + kLANES, m.random);
                }
                for (uint32_t lane : lanes)
                {
                    Fiber& f = m.fibers[w * kLANES + lane];
                    if (f.state != State::kREADY)
                    {
                        continue;
                    }
                    again = hasRun = true;
                    resume(m, f);
                    if (m.hasFailed)
                    {
                        return;
                    }
                }
                // Now and then another warp goes first.
                again = again && !(m.shuffled && m.random() % 8 == 0);
            }
        }
        if (!hasRun && m.barrier.ended != m.threads)
        {
            std::string where;
            for (uint32_t w = 0; w < warps; ++w)
            {
                Warp const& warp = m.warps[w];
                if (warp.arrived != 0)
                {
                    where += "\n    warp " + std::to_string(w) + ": " + std::to_string(warp.arrived) + " lanes wait in "
                             + warp.name + " (line " + std::to_string(warp.line) + "), " + std::to_string(warp.ended)
                             + " have ended";
                }
            }
            if (m.barrier.arrived != 0)
            {
                where += "\n    " + std::to_string(m.barrier.arrived) + " threads wait in __syncthreads (line "
                         + std::to_string(m.barrier.line) + "), " + std::to_string(m.barrier.ended) + " have ended";
            }
            fail(cudaErrorLaunchFailure, "deadlock: no thread can go on%s", where.c_str());
        }
    }
    for (size_t i = 0; i < kRED_ZONE; ++i)
    {
        if (dynamicShared[m.launch.sharedBytes + i] != kRED)
        {
            fail(cudaErrorIllegalAddress, "dynamic shared memory was written past its end, at byte %zu of %zu",
                m.launch.sharedBytes + i, m.launch.sharedBytes);
        }
    }
}

void printPlace(Machine const& m)
{
    std::fprintf(stderr, "  in %s\n  grid (%u, %u, %u), block (%u, %u, %u) of %u threads",
        kernelAt(m.launch.kernel).name.c_str(), m.launch.grid.x, m.launch.grid.y, m.launch.grid.z, blockIdx.x,
        blockIdx.y, blockIdx.z, m.threads);
    if (running != nullptr)
    {
        std::fprintf(stderr, ", thread %u (warp %u lane %u)\n", fiber().index, fiber().index / kLANES, running->lane);
        void* frames[48];
        int const count = backtrace(frames, 48);
        printFrames(frames, count);
    }
    else
    {
        std::fprintf(stderr, "\n");
    }
}

void onSignal(int signal, siginfo_t* info, void*)
{
    Machine& m = machine();
    if (!m.isRunning || running == nullptr || m.hasFailed)
    {
        std::signal(signal, SIG_DFL);
        raise(signal);
        return;
    }
    unsigned char const* const at = static_cast<unsigned char const*>(info->si_addr);
    bool const isStack = at >= m.stacks && at < m.stacks + kMAX_THREADS * (kSTACK + kGUARD);
    fail(cudaErrorIllegalAddress, "%s at %p",
        signal == SIGFPE ? "division by zero"
        : isStack        ? "stack of a fiber overflows"
                         : "illegal address",
        info->si_addr);
}

struct Signals // caught during a launch
{
    Signals()
    {
        Machine& m = machine();
        if (m.signalStack == nullptr)
        {
            m.signalStack = new unsigned char[256 << 10];
        }
        stack_t stack{};
        stack.ss_sp = m.signalStack;
        stack.ss_size = 256 << 10;
        sigaltstack(&stack, &oldStack);
        struct sigaction action{};
        action.sa_sigaction = onSignal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; ++i)
        {
            sigaction(kSIGNALS[i], &action, &old[i]);
        }
    }

    ~Signals()
    {
        for (int i = 0; i < 3; ++i)
        {
            sigaction(kSIGNALS[i], &old[i], nullptr);
        }
        sigaltstack(&oldStack, nullptr);
    }

    static constexpr int kSIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};
    stack_t oldStack{};
    struct sigaction old[3];
};

void makeStacks(Machine& m)
{
    if (m.stacks != nullptr)
    {
        return;
    }
    size_t const bytes = kMAX_THREADS * (kSTACK + kGUARD);
    void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
    {
        std::perror("emulator: mmap of stacks");
        std::abort();
    }
    m.stacks = static_cast<unsigned char*>(p);
    for (uint32_t i = 0; i < kMAX_THREADS; ++i)
    {
        mprotect(m.stacks + i * (kSTACK + kGUARD), kGUARD, PROT_NONE);
    }
    m.fibers.resize(kMAX_THREADS);
    m.warps.resize(kMAX_THREADS / kLANES);
}

cudaError_t refuse(Machine& m, cudaError_t error, std::string const& why)
{
    m.lastMessage = why + ", in " + kernelAt(m.launch.kernel).name;
    std::fprintf(stderr, "emulator: launch refused: %s\n", m.lastMessage.c_str());
    return error;
}

} // namespace

void fail(cudaError_t error, char const* format, ...)
{
    Machine& m = machine();
    char text[2048];
    va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    m.lastMessage = text;
    std::fprintf(stderr, "emulator: %s\n", text);
    m.error = error;
    m.hasFailed = true;
    printPlace(m);
    std::fflush(stderr);
    if (std::getenv("TSK_EMULATED_ABORT") != nullptr)
    {
        std::abort();
    }
    if (running != nullptr)
    {
        toScheduler(); // for good
    }
    throw error;
}

LaneMemory laneMemory()
{
    Machine& m = machine();
    Warp& warp = m.warps[running->index / kLANES];
    return {warp.in[running->lane], warp.out[running->lane]};
}

void meet(Combine combine, uint32_t mask, char const* name, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    Warp& warp = m.warps[f.index / kLANES];
    if (mask != 0xffffffffU)
    {
        fail(cudaErrorLaunchFailure, "%s (line %d) with mask %08x: only whole warps are emulated", name, line, mask);
    }
    if (warp.arrived == 0)
    {
        warp.combine = combine;
        warp.name = name;
        warp.line = line;
        warp.firstLane = f.lane;
    }
    else if (warp.combine != combine || warp.line != line)
    {
        fail(cudaErrorLaunchFailure, "lanes of a warp part: this one is in %s (line %d), lane %u in %s (line %d)", name,
            line, warp.firstLane, warp.name, warp.line);
    }
    if (warp.ended != 0)
    {
        fail(cudaErrorLaunchFailure, "%s (line %d) when %u lanes of the warp have ended", name, line, warp.ended);
    }
    if (++warp.arrived == kLANES)
    {
        combine(warp.in, warp.out);
        warp.arrived = 0;
        Fiber* const lanes = &m.fibers[f.index / kLANES * kLANES];
        for (uint32_t i = 0; i < kLANES; ++i)
        {
            lanes[i].state = State::kREADY;
        }
        if (m.reversed || m.shuffled)
        {
            toScheduler(); // the last one to arrive need not be the first to go on
        }
    }
    else
    {
        f.state = State::kWARP;
        giveWay(m);
    }
}

int blockBarrier(Vote vote, int predicate, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    Barrier& b = m.barrier;
    if (b.arrived == 0)
    {
        b.vote = vote;
        b.line = line;
        b.firstThread = f.index;
        b.count = 0;
    }
    else if (b.vote != vote || b.line != line)
    {
        fail(cudaErrorLaunchFailure,
            "threads of a block part: this one is in __syncthreads of line %d, thread %u in that of line %d", line,
            b.firstThread, b.line);
    }
    if (b.ended != 0)
    {
        fail(cudaErrorLaunchFailure, "__syncthreads (line %d) when %u threads of the block have ended", line, b.ended);
    }
    b.count += predicate != 0 ? 1 : 0;
    if (++b.arrived == m.threads)
    {
        b.arrived = 0;
        b.result = vote == Vote::kAND  ? b.count == static_cast<int>(m.threads)
                   : vote == Vote::kOR ? b.count != 0
                                       : b.count;
        for (uint32_t i = 0; i < m.threads; ++i)
        {
            m.fibers[i].state = State::kREADY;
        }
    }
    else
    {
        f.state = State::kBLOCK;
    }
    giveWay(m);
    return b.result;
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

size_t& askedShared(void const* kernel)
{
    return machine().askedShared[kernel];
}

char const* lastMessage()
{
    return machine().lastMessage.c_str();
}

cudaError_t run(Launch const& launch)
{
    Machine& m = machine();
    std::lock_guard<std::mutex> const lock(m.mutex);
    makeStacks(m);
    readEnvironment(m);
    m.launch = launch;
    m.hasFailed = false;
    m.error = cudaSuccess;
    uint64_t const threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
    if (threads == 0 || threads > kMAX_THREADS)
    {
        return refuse(m, cudaErrorInvalidConfiguration, std::to_string(threads) + " threads a block");
    }
    if (threads % kLANES != 0)
    {
        return refuse(m, cudaErrorInvalidConfiguration,
            std::to_string(threads) + " threads a block; only whole warps are emulated");
    }
    if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0 || launch.grid.x > 0x7fffffffU
        || launch.grid.y > 65535 || launch.grid.z > 65535)
    {
        return refuse(m, cudaErrorInvalidConfiguration,
            "grid (" + std::to_string(launch.grid.x) + ", " + std::to_string(launch.grid.y) + ", "
                + std::to_string(launch.grid.z) + ")");
    }
    Kernel const& kernel = kernelAt(launch.kernel);
    auto const asked = m.askedShared.find(launch.kernel);
    size_t const limit = std::max(kSHARED_WITHOUT_ASKING, asked == m.askedShared.end() ? 0 : asked->second);
    if (launch.sharedBytes > limit)
    {
        return refuse(m, cudaErrorInvalidValue,
            std::to_string(launch.sharedBytes) + " bytes of dynamic shared memory where " + std::to_string(limit)
                + " were asked for by cudaFuncSetAttribute");
    }
    size_t own = 0;
    for (Range const& range : kernel.shared)
    {
        own += range.isOwn ? range.bytes : 0;
    }
    if (own > kSHARED_WITHOUT_ASKING || own + launch.sharedBytes > kMAX_SHARED)
    {
        return refuse(m, cudaErrorInvalidValue,
            std::to_string(own) + " bytes of static and " + std::to_string(launch.sharedBytes)
                + " of dynamic shared memory");
    }
    m.threads = static_cast<uint32_t>(threads);
    blockDim = launch.block;
    gridDim = launch.grid;
    Signals const signals;
    m.isRunning = true;
    uint64_t const blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    try
    {
        for (uint64_t i = 0; i < blocks && !m.hasFailed; ++i)
        {
            uint64_t const b = m.reversed ? blocks - 1 - i : i;
            blockIdx.x = static_cast<uint32_t>(b % launch.grid.x);
            blockIdx.y = static_cast<uint32_t>(b / launch.grid.x % launch.grid.y);
            blockIdx.z = static_cast<uint32_t>(b / launch.grid.x / launch.grid.y);
            dirtySharedMemory(m, kernel);
            runBlock(m);
        }
    }
    catch (cudaError_t)
    {
    }
    running = nullptr;
    m.isRunning = false;
    return m.hasFailed ? m.error : cudaSuccess;
}

} // namespace emulator
