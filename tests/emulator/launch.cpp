// A launch from its checks to its end.
#include "machine.h"

#include <algorithm>
#include <csignal>
#include <sys/mman.h>

namespace emulator
{
namespace
{

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
    m.pieces.resize(kPIECES);
}

cudaError_t refuse(Machine& m, cudaError_t error, std::string const& why)
{
    m.lastMessage = why + ", in " + kernelAt(m.launch.kernel).name;
    std::fprintf(stderr, "emulator: launch refused: %s\n", m.lastMessage.c_str());
    return error;
}

} // namespace

void askForShared(void const* kernel, size_t bytes)
{
    Machine& m = machine();
    std::lock_guard<std::mutex> const lock(m.mutex);
    m.askedShared[kernel] = bytes;
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
    if (m.hasFailed)
    {
        m.pieces.assign(kPIECES, Piece{});
    }
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
            dirtySharedMemory(kernel);
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
