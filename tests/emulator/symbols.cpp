#include "symbols.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// Its offset is in the symbol table.
extern "C"
{
__thread int emulatorAnchor = 1;
}

namespace emulator
{
namespace
{

struct Table
{
    std::string path;
    uintptr_t base{0};
    size_t threadBytes{0};
    size_t anchorOffset{0};
    std::map<uintptr_t, std::string> functions; // mangled, by address
    std::map<std::string, Range> variables;     // thread-local, by mangled name and a number
    std::map<void const*, Kernel> kernels;

    Table();
};

Table& table()
{
    static Table& t = *new Table;
    return t;
}

std::string demangled(std::string const& name)
{
    int status = 0;
    char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    std::string const result = status == 0 ? text : name;
    std::free(text);
    return result;
}

Table::Table()
{
    Dl_info info{};
    dladdr(reinterpret_cast<void const*>(&kernelAt), &info);
    path = info.dli_fname;
    if (path.find('/') == std::string::npos)
    {
        path = "/proc/self/exe";
    }
    int const file = open(path.c_str(), O_RDONLY);
    struct stat status{};
    if (file < 0 || fstat(file, &status) != 0)
    {
        std::fprintf(stderr, "emulator: cannot read %s\n", path.c_str());
        std::abort();
    }
    void const* const mapped = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    auto const* const bytes = static_cast<unsigned char const*>(mapped);
    auto const& header = *reinterpret_cast<Elf64_Ehdr const*>(bytes);
    base = header.e_type == ET_DYN ? reinterpret_cast<uintptr_t>(info.dli_fbase) : 0;
    auto const* const programs = reinterpret_cast<Elf64_Phdr const*>(bytes + header.e_phoff);
    for (int i = 0; i < header.e_phnum; ++i)
    {
        if (programs[i].p_type == PT_TLS)
        {
            threadBytes = programs[i].p_memsz;
        }
    }
    auto const* const sections = reinterpret_cast<Elf64_Shdr const*>(bytes + header.e_shoff);
    for (int i = 0; i < header.e_shnum; ++i)
    {
        if (sections[i].sh_type != SHT_SYMTAB)
        {
            continue;
        }
        auto const* const symbols = reinterpret_cast<Elf64_Sym const*>(bytes + sections[i].sh_offset);
        auto const* const names = reinterpret_cast<char const*>(bytes + sections[sections[i].sh_link].sh_offset);
        for (size_t k = 0; k < sections[i].sh_size / sizeof(Elf64_Sym); ++k)
        {
            Elf64_Sym const& symbol = symbols[k];
            std::string const name = names + symbol.st_name;
            int const type = ELF64_ST_TYPE(symbol.st_info);
            if (type == STT_FUNC && symbol.st_shndx != SHN_UNDEF)
            {
                functions[base + symbol.st_value] = name;
            }
            else if (type == STT_TLS && symbol.st_shndx != SHN_UNDEF)
            {
                if (name == "emulatorAnchor")
                {
                    anchorOffset = symbol.st_value;
                }
                else if (name.compare(0, 3, "_ZZ") == 0) // of a function
                {
                    variables[name + "#" + std::to_string(k)] = Range{symbol.st_value, symbol.st_size, false};
                }
            }
        }
    }
    munmap(const_cast<void*>(mapped), static_cast<size_t>(status.st_size));
}

} // namespace

unsigned char* sharedBase()
{
    return reinterpret_cast<unsigned char*>(&emulatorAnchor) - table().anchorOffset;
}

size_t sharedBytes()
{
    return table().threadBytes;
}

Kernel const& kernelAt(void const* address)
{
    Table& t = table();
    auto const known = t.kernels.find(address);
    if (known != t.kernels.end())
    {
        return known->second;
    }
    Kernel kernel;
    auto const function = t.functions.find(reinterpret_cast<uintptr_t>(address));
    std::string const mangled = function == t.functions.end() ? "" : function->second;
    kernel.name = mangled.empty() ? "a kernel without a name" : demangled(mangled);
    // Variables of a function f, _ZN..., are called _ZZN...E<name>.
    std::string const own = mangled.size() > 2 ? "_ZZ" + mangled.substr(2) + "E" : "?";
    for (auto const& variable : t.variables)
    {
        bool isOthers = false; // of another kernel
        bool const isOwn = variable.first.compare(0, own.size(), own) == 0;
        if (!isOwn)
        {
            isOthers = variable.first.find("Kernel") != std::string::npos;
        }
        if (!isOthers)
        {
            Range range = variable.second;
            range.isOwn = isOwn;
            kernel.shared.push_back(range);
        }
    }
    return t.kernels.emplace(address, kernel).first->second;
}

void printFrames(void* const* frames, int count)
{
    Table& t = table();
    std::string command = "addr2line -Cfpie '" + t.path + "'";
    bool any = false;
    for (int i = 0; i < count; ++i)
    {
        uintptr_t const at = reinterpret_cast<uintptr_t>(frames[i]);
        auto function = t.functions.upper_bound(at);
        Dl_info info{};
        if (function == t.functions.begin() || dladdr(frames[i], &info) == 0
            || (t.base != 0 && reinterpret_cast<uintptr_t>(info.dli_fbase) != t.base))
        {
            continue;
        }
        --function;
        if (function->second.find("N8emulator") != std::string::npos)
        {
            continue; // the emulator itself
        }
        char text[32];
        std::snprintf(text, sizeof(text), " %zx", static_cast<size_t>(at - t.base - 1));
        command += text;
        any = true;
    }
    if (!any)
    {
        return;
    }
    // Without what the emulator and the C++ library do; at most 12.
    command
        += " 2>/dev/null | grep -v -e 'tests/emulator/include/' -e 'tests/emulator/[a-z_]*\\.cpp' -e '/include/c++/'"
           " | sed -e 's/^ (inlined by) //' -e 's/trtllm_shadowkv::kernels:://g' -e 's/(anonymous namespace):://g'"
           " | head -12 | sed 's/^/    /' >&2";
    std::fflush(stderr);
    if (std::system(command.c_str()) != 0)
    {
        std::fprintf(stderr, "    (no addr2line)\n");
    }
}

} // namespace emulator
