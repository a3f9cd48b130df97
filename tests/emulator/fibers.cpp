// The threads of a block as fibers: their order, barriers and collectives.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <execinfo.h>

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

Machine* const theMachine = new Machine; // never destroyed: there may be launches in static destructors
Fiber* running = nullptr;

namespace
{

void resume(Machine& m, Fiber& f)
{
    running = &f;
    threadIdx = f.threadIndex;
    emulatorSwitch(&m.scheduler, f.stackPointer);
    running = nullptr;
}

void fiberMain()
{
    Machine& m = machine();
    m.launch.invoke(m.launch.arguments);
    Fiber& f = fiber();
    checkProducts();
    if (f.arrivals.empty()) // else when they do
    {
        copyAllOf(f);
    }
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
    f.copies = 0;
    f.arrivals.clear();
    f.products.clear();
    f.batches = 0;
    f.hasBegun = false;
    f.fence = 0;
    // Not all at the same place of a page: they would push each other out of the cache.
    unsigned char* const top = m.stacks + (index + 1) * (kSTACK + kGUARD) - index % kLANES * 1088;
    void** p = reinterpret_cast<void**>(top) - 8;
    p[6] = reinterpret_cast<void*>(&fiberMain); // after six registers: where `ret` goes
    p[7] = nullptr;                             // fiberMain finds the stack as after a call
    std::fill(p, p + 6, nullptr);
    f.stackPointer = p;
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

} // namespace

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

void toScheduler()
{
    emulatorSwitch(&fiber().stackPointer, machine().scheduler);
}

void runBlock(Machine& m)
{
    uint32_t const warps = m.threads / kLANES;
    m.barrier = Barrier{};
    clearBarriers(m);
    m.blockTime = ++m.time;
    for (Warp& warp : m.warps)
    {
        warp.arrived = warp.ended = 0;
        warp.reads.clear();
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
        if (m.copiesRandom && m.random() % 4 == 0)
        {
            letArrive(m);
        }
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
        if (!hasRun && m.barrier.ended != m.threads && !endProducts(m) && !letArrive(m))
        {
            std::string where = waitersOf(m);
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
    for (uint32_t i = 0; i < m.threads; ++i)
    {
        copyAllOf(m.fibers[i]);
    }
    checkSharedMemory();
}

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
        ++m.meetings;
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

} // namespace emulator
