// Barriers of kernels/hopper.cuh: in shared memory, and of a part of the block.
#include "machine.h"

#include <algorithm>

namespace emulator
{
namespace
{

// What the 8 bytes hold: who writes over them is told.
uint64_t markOf(uint32_t address)
{
    return 0x5afe'ba88'0000'0000U | address;
}

PhaseBarrier& barrierAt(uint32_t address, char const* name, int line)
{
    Machine& m = machine();
    void const* const p = sharedPointer(address, 8, 8);
    auto const found = m.phaseBarriers.find(address);
    if (found == m.phaseBarriers.end())
    {
        fail(cudaErrorLaunchFailure, "%s (line %d) of a barrier that initBarrier() did not make, at %s", name, line,
            nameOf(address).c_str());
    }
    PhaseBarrier& b = found->second;
    uint64_t mark = 0;
    std::memcpy(&mark, p, sizeof(mark));
    if (mark != markOf(address))
    {
        fail(cudaErrorLaunchFailure, "%s (line %d): the barrier at %s was written over", name, line,
            nameOf(address).c_str());
    }
    if (running != nullptr && b.thread != fiber().index && b.meeting == m.meetings)
    {
        fail(cudaErrorLaunchFailure, "%s (line %d) before a barrier of the block after initBarrier() of thread %u",
            name, line, b.thread);
    }
    return b;
}

// Whether the thread's arrival in this phase is to come.
bool isToArrive(Fiber const& f, uint32_t address)
{
    return std::any_of(
        f.arrivals.begin(), f.arrivals.end(), [address](Arrival const& arrival) { return arrival.barrier == address; });
}

void arriveNow(Machine& m, uint32_t thread, uint32_t address, PhaseBarrier& b, int line)
{
    if (b.last[thread] == b.phases + 1 || isToArrive(m.fibers[thread], address))
    {
        fail(cudaErrorLaunchFailure,
            "thread %u arrives (line %d) a second time in phase %llu of the barrier at %s: %u of %u have arrived",
            thread, line, static_cast<unsigned long long>(b.phases), nameOf(address).c_str(), b.arrived, b.expected);
    }
    b.last[thread] = b.phases + 1;
    if (++b.arrived != b.expected)
    {
        return;
    }
    if (b.unseen != 0)
    {
        fail(cudaErrorLaunchFailure,
            "more arrivals than expected: thread %u ends (line %d) phase %llu of the barrier at %s before %u threads "
            "that wait have seen the end of the one before",
            thread, line, static_cast<unsigned long long>(b.phases), nameOf(address).c_str(), b.unseen);
    }
    b.arrived = 0;
    ++b.phases;
    b.unseen = static_cast<uint32_t>(b.waiters.size());
    for (uint32_t i : b.waiters)
    {
        m.fibers[i].state = State::kREADY;
    }
    b.waiters.clear();
}

// "3, 128-255"
std::string listOf(std::vector<uint32_t> const& threads)
{
    std::string text;
    for (size_t i = 0; i < threads.size();)
    {
        size_t end = i + 1;
        for (; end < threads.size() && threads[end] == threads[end - 1] + 1; ++end)
        {
        }
        text += (text.empty() ? "" : ", ") + std::to_string(threads[i]);
        text += end - i > 1 ? "-" + std::to_string(threads[end - 1]) : "";
        i = end;
    }
    return text;
}

} // namespace

void clearBarriers(Machine& m)
{
    m.phaseBarriers.clear();
    m.meetings = 0;
    for (PartBarrier& part : m.parts)
    {
        part.arrived = 0;
    }
}

void initBarrier(uint32_t barrier, int32_t arrivals, int line)
{
    Machine& m = machine();
    void* const p = sharedPointer(barrier, 8, 8);
    if (arrivals < 1 || arrivals >= 1 << 20)
    {
        fail(cudaErrorLaunchFailure, "initBarrier (line %d) of %d arrivals", line, arrivals);
    }
    if (m.phaseBarriers.count(barrier) != 0)
    {
        fail(cudaErrorLaunchFailure, "initBarrier (line %d) a second time, at %s", line, nameOf(barrier).c_str());
    }
    PhaseBarrier& b = m.phaseBarriers[barrier];
    b.expected = static_cast<uint32_t>(arrivals);
    b.arrived = b.unseen = 0;
    b.phases = 0;
    b.thread = fiber().index;
    b.meeting = m.meetings;
    b.last.assign(m.threads, 0);
    uint64_t const mark = markOf(barrier);
    std::memcpy(p, &mark, sizeof(mark));
}

void arrive(uint32_t barrier, int line)
{
    arriveNow(machine(), fiber().index, barrier, barrierAt(barrier, "arrive", line), line);
}

void arriveWithCopies(uint32_t barrier, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    PhaseBarrier& b = barrierAt(barrier, "arriveWithCopies", line);
    if ((isLate(m) || !f.arrivals.empty()) && !isToArrive(f, barrier))
    {
        f.arrivals.push_back(Arrival{barrier, f.copies, line});
        return;
    }
    copyUntil(f, f.copies);
    arriveNow(m, f.index, barrier, b, line);
}

void await(uint32_t barrier, uint32_t parity, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    PhaseBarrier& b = barrierAt(barrier, "await", line);
    if (parity > 1)
    {
        fail(cudaErrorLaunchFailure, "await (line %d) of parity %u", line, parity);
    }
    if (b.phases % 2 != parity)
    {
        return;
    }
    b.waiters.push_back(f.index);
    f.barrier = barrier;
    f.parity = parity;
    f.line = line;
    f.state = State::kPHASE;
    giveWay(m);
    --b.unseen;
}

bool letArrive(Machine& m)
{
    bool any = false;
    uint32_t done = UINT32_MAX;
    for (uint32_t i = 0; i < m.threads; ++i)
    {
        Fiber const& waiter = m.fibers[i];
        if (waiter.state != State::kPHASE || waiter.barrier == done)
        {
            continue;
        }
        done = waiter.barrier;
        for (uint32_t k = 0; k < m.threads; ++k)
        {
            Fiber& f = m.fibers[k];
            auto const has = [&](Arrival const& arrival) { return arrival.barrier == done; };
            // The arrivals before it too: all that they wait for is there.
            auto const wanted = std::find_if(f.arrivals.begin(), f.arrivals.end(), has);
            size_t const count = wanted == f.arrivals.end() ? 0 : static_cast<size_t>(wanted - f.arrivals.begin()) + 1;
            for (size_t n = 0; n < count; ++n)
            {
                Arrival const arrival = f.arrivals.front();
                f.arrivals.erase(f.arrivals.begin());
                copyUntil(f, arrival.copies);
                arriveNow(
                    m, k, arrival.barrier, barrierAt(arrival.barrier, "arriveWithCopies", arrival.line), arrival.line);
                any = true;
            }
        }
        if (waiter.state == State::kREADY)
        {
            return true;
        }
    }
    return any;
}

void partBarrier(int32_t id, uint32_t count, bool waits, int line)
{
    Machine& m = machine();
    Fiber& f = fiber();
    char const* const name = waits ? "meetAt" : "arriveAt";
    if (id < 1 || id >= static_cast<int32_t>(kPARTS) || count == 0 || count % kLANES != 0 || count > m.threads)
    {
        fail(cudaErrorLaunchFailure, "%s (line %d) of barrier %d and %u threads of %u", name, line, id, count,
            m.threads);
    }
    PartBarrier& b = m.parts[id];
    if (b.arrived == 0)
    {
        b.count = count;
        b.line = line;
        b.firstThread = f.index;
        b.perWarp.assign(m.threads / kLANES, 0);
        b.isHere.assign(m.threads, false);
    }
    else if (b.count != count)
    {
        fail(cudaErrorLaunchFailure, "%s (line %d): barrier %d of %u threads here, of %u for thread %u (line %d)", name,
            line, id, count, b.count, b.firstThread, b.line);
    }
    if (b.isHere[f.index])
    {
        fail(cudaErrorLaunchFailure, "%s (line %d): the thread is at barrier %d already, where %u of %u have arrived",
            name, line, id, b.arrived, count);
    }
    b.isHere[f.index] = true;
    ++b.perWarp[f.index / kLANES];
    if (++b.arrived == count)
    {
        b.arrived = 0;
        ++m.meetings;
        for (uint32_t n : b.perWarp)
        {
            if (n != 0 && n != kLANES)
            {
                fail(cudaErrorLaunchFailure, "%s (line %d): %u lanes of a warp at barrier %d", name, line, n, id);
            }
        }
        for (uint32_t i = 0; i < m.threads; ++i)
        {
            Fiber& other = m.fibers[i];
            if (other.state == State::kPART && other.barrier == static_cast<uint32_t>(id))
            {
                other.state = State::kREADY;
            }
        }
    }
    else if (waits)
    {
        f.barrier = static_cast<uint32_t>(id);
        f.line = line;
        f.state = State::kPART;
    }
    if (waits)
    {
        giveWay(m);
    }
}

std::string waitersOf(Machine const& m)
{
    // By what they wait for, in words.
    std::map<std::string, std::vector<uint32_t>> waiters;
    for (uint32_t i = 0; i < m.threads; ++i)
    {
        Fiber const& f = m.fibers[i];
        std::string const line = " (line " + std::to_string(f.line) + ")";
        if (f.state == State::kPHASE)
        {
            PhaseBarrier const& b = m.phaseBarriers.at(f.barrier);
            waiters["for parity " + std::to_string(f.parity) + " of the barrier at " + nameOf(f.barrier) + line
                    + ", in phase " + std::to_string(b.phases) + " of which " + std::to_string(b.arrived) + " of "
                    + std::to_string(b.expected) + " have arrived"]
                .push_back(i);
        }
        else if (f.state == State::kPART)
        {
            PartBarrier const& b = m.parts[f.barrier];
            waiters["at barrier " + std::to_string(f.barrier) + line + ", where " + std::to_string(b.arrived) + " of "
                    + std::to_string(b.count) + " have arrived"]
                .push_back(i);
        }
    }
    std::string text;
    for (auto const& [where, threads] : waiters)
    {
        text += "\n    threads " + listOf(threads) + " wait " + where;
    }
    return text;
}

} // namespace emulator
