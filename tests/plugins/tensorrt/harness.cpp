// Drives the plugins of a library as TensorRT does before an engine runs: with TensorRT's headers, without TensorRT and
// without a GPU. harness.py loads it by ctypes. Sizes of tensors are symbols or numbers, as in TensorRT's own build.
#include "NvInfer.h"
#include "sizes.h"

#include <cctype>
#include <cstring>
#include <dlfcn.h>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using namespace nvinfer1;
using harness::Sizes;
using harness::valueOf;

#define HARNESS_API extern "C" __attribute__((visibility("default")))

namespace
{

// What a tensor is: harness.py has its twin.
struct Tensor
{
    int32_t type;
    int32_t format;
    int32_t rank;
    int64_t size[Dims::MAX_DIMS]; // -1: not known while an engine is built
    int64_t low[Dims::MAX_DIMS];  // of an optimisation profile
    int64_t high[Dims::MAX_DIMS];
};

// One attribute as ONNX's parser or an engine gives it: harness.py has its twin.
struct Field
{
    char const* name;
    void const* data;
    int32_t type;
    int32_t length;
};

// --- a log ----------------------------------------------------------------------------------------------------------

struct Log final : ILogger
{
    void log(Severity severity, char const* message) noexcept override
    {
        text += std::to_string(static_cast<int32_t>(severity)) + " " + message + '\0';
    }

    std::string text;
};

struct Finder final : ILoggerFinder
{
    ILogger* findLogger() override
    {
        return logger;
    }

    ILogger* logger{nullptr};
};

// --- the library and its plugins ------------------------------------------------------------------------------------

struct Library
{
    IPluginCreatorInterface* const* (*getCreators)(int32_t&);
    void (*setLoggerFinder)(ILoggerFinder*);
    Log log;
    Finder finder;

    IPluginCreatorV3One* creator(int32_t index)
    {
        int32_t count = 0;
        IPluginCreatorInterface* const* const all = getCreators(count);
        return index < count ? static_cast<IPluginCreatorV3One*>(all[index]) : nullptr;
    }
};

thread_local std::string theAnswer; // what the last call returned, until the next

char const* answer(std::string text)
{
    theAnswer = std::move(text);
    return theAnswer.c_str();
}

template <typename Interface>
Interface* capability(IPluginV3* plugin, PluginCapabilityType type)
{
    return static_cast<Interface*>(plugin->getCapabilityInterface(type));
}

IPluginV3OneBuild* buildOf(IPluginV3* plugin)
{
    return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime* runtimeOf(IPluginV3* plugin)
{
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

Dims dimsOf(int64_t const* sizes, int32_t rank)
{
    Dims dims{};
    dims.nbDims = rank;
    std::memcpy(dims.d, sizes, sizeof(dims.d));
    return dims;
}

PluginTensorDesc staticDesc(Tensor const& t)
{
    return {dimsOf(t.size, t.rank), static_cast<DataType>(t.type), static_cast<TensorFormat>(t.format), -1.0F};
}

std::vector<PluginTensorDesc> staticDescs(Tensor const* tensors, int32_t count)
{
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i)
    {
        descs.push_back(staticDesc(tensors[i]));
    }
    return descs;
}

std::vector<DynamicPluginTensorDesc> dynamicDescs(Tensor const* tensors, int32_t count)
{
    std::vector<DynamicPluginTensorDesc> descs;
    for (int32_t i = 0; i < count; ++i)
    {
        Tensor const& t = tensors[i];
        Dims const high = dimsOf(t.high, t.rank);
        descs.push_back({staticDesc(t), dimsOf(t.low, t.rank), high, high});
    }
    return descs;
}

// "N,960;B": a number is a constant, all else a symbol, nothing a tensor without sizes.
std::vector<DimsExprs> expressionsOf(char const* shapes, Sizes& sizes)
{
    std::vector<DimsExprs> tensors;
    std::istringstream all(shapes);
    for (std::string tensor; std::getline(all, tensor, ';');)
    {
        DimsExprs expressions{};
        std::istringstream one(tensor);
        for (std::string size; std::getline(one, size, ',');)
        {
            bool const number = std::isdigit(static_cast<unsigned char>(size[0])) != 0;
            expressions.d[expressions.nbDims++] = number ? sizes.constant(std::stoll(size)) : sizes.symbol(size);
        }
        tensors.push_back(expressions);
    }
    return tensors;
}

std::string bytesOf(PluginField const& field)
{
    static int32_t const kBYTES[] = {2, 4, 8, 1, 2, 4, 1, 0, 0, 2, 8};
    auto const type = static_cast<size_t>(field.type);
    int32_t const bytes = type < std::size(kBYTES) ? field.length * kBYTES[type] : 0;
    std::string text;
    for (int32_t i = 0; field.data != nullptr && i < bytes; ++i)
    {
        uint8_t const byte = static_cast<uint8_t const*>(field.data)[i];
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

// "name|type|length|bytes" a line
std::string textOf(PluginFieldCollection const* fields)
{
    std::ostringstream text;
    for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i)
    {
        PluginField const& f = fields->fields[i];
        text << f.name << '|' << static_cast<int32_t>(f.type) << '|' << f.length << '|' << bytesOf(f) << '\n';
    }
    return text.str();
}

} // namespace

// --- the library ----------------------------------------------------------------------------------------------------

// Null where it cannot be loaded (harness_answer says why) or has no plugins (harness_answer is empty).
HARNESS_API Library* harness_open(char const* path)
{
    void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr)
    {
        answer(dlerror());
        return nullptr;
    }
    auto* const library = new Library{};
    library->getCreators = reinterpret_cast<decltype(library->getCreators)>(dlsym(handle, "getCreators"));
    library->setLoggerFinder = reinterpret_cast<decltype(library->setLoggerFinder)>(dlsym(handle, "setLoggerFinder"));
    if (library->getCreators == nullptr || library->setLoggerFinder == nullptr)
    {
        answer("");
        delete library;
        return nullptr;
    }
    return library;
}

HARNESS_API char const* harness_answer()
{
    return theAnswer.c_str();
}

// 0: a logger that keeps its lines; 1: a finder that finds no logger; 2: no finder.
HARNESS_API void harness_set_logger(Library* library, int32_t kind)
{
    library->finder.logger = kind == 0 ? &library->log : nullptr;
    library->setLoggerFinder(kind == 2 ? nullptr : &library->finder);
}

// "severity line" of each line since the last call, each ended by a zero; returns how many bytes there are.
HARNESS_API int32_t harness_take_log(Library* library)
{
    theAnswer = std::exchange(library->log.text, {});
    return static_cast<int32_t>(theAnswer.size());
}

HARNESS_API int32_t harness_creator_count(Library* library)
{
    int32_t count = -1;
    IPluginCreatorInterface* const* const first = library->getCreators(count);
    return library->getCreators(count) == first ? count : -1;
}

// "kind|major|name|version|namespace", then the fields
HARNESS_API char const* harness_creator(Library* library, int32_t index)
{
    IPluginCreatorV3One* const c = library->creator(index);
    InterfaceInfo const info = c->getInterfaceInfo();
    std::ostringstream text;
    text << info.kind << '|' << info.major << '|' << c->getPluginName() << '|' << c->getPluginVersion() << '|'
         << c->getPluginNamespace() << '\n'
         << textOf(c->getFieldNames());
    return answer(text.str());
}

// Null as createPlugin returns it. `fields` null: no collection of fields at all.
HARNESS_API IPluginV3* harness_create(
    Library* library, int32_t index, int32_t phase, int32_t count, Field const* fields)
{
    std::vector<PluginField> list;
    for (int32_t i = 0; i < count; ++i)
    {
        list.emplace_back(
            fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type), fields[i].length);
    }
    PluginFieldCollection const collection{count, list.data()};
    return library->creator(index)->createPlugin(
        "node", fields == nullptr ? nullptr : &collection, static_cast<TensorRTPhase>(phase));
}

// --- a plugin -------------------------------------------------------------------------------------------------------

HARNESS_API void harness_destroy(IPluginV3* plugin)
{
    delete plugin;
}

HARNESS_API IPluginV3* harness_clone(IPluginV3* plugin)
{
    return plugin->clone();
}

HARNESS_API IPluginV3* harness_attach(IPluginV3* plugin)
{
    return runtimeOf(plugin)->attachToContext(nullptr);
}

// "kind|major" of the plugin and of each capability, 0 to 3; "none" where there is none
HARNESS_API char const* harness_capabilities(IPluginV3* plugin)
{
    std::ostringstream text;
    text << plugin->getInterfaceInfo().kind << '|' << plugin->getInterfaceInfo().major << '\n';
    for (int32_t i = 0; i < 4; ++i)
    {
        IPluginCapability* const c = plugin->getCapabilityInterface(static_cast<PluginCapabilityType>(i));
        if (c == nullptr)
        {
            text << "none\n";
            continue;
        }
        InterfaceInfo const info = c->getInterfaceInfo();
        text << info.kind << '|' << info.major << '\n';
    }
    return answer(text.str());
}

// "name|version|namespace"
HARNESS_API char const* harness_core(IPluginV3* plugin)
{
    auto* const core = capability<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
    return answer(
        std::string(core->getPluginName()) + '|' + core->getPluginVersion() + '|' + core->getPluginNamespace());
}

HARNESS_API char const* harness_serialized(IPluginV3* plugin)
{
    return answer(textOf(runtimeOf(plugin)->getFieldsToSerialize()));
}

HARNESS_API int32_t harness_output_count(IPluginV3* plugin)
{
    return buildOf(plugin)->getNbOutputs();
}

HARNESS_API int32_t harness_output_types(
    IPluginV3* plugin, int32_t inputs, int32_t const* inputTypes, int32_t outputs, int32_t* outputTypes)
{
    std::vector<DataType> in;
    for (int32_t i = 0; i < inputs; ++i)
    {
        in.push_back(static_cast<DataType>(inputTypes[i]));
    }
    std::vector<DataType> out(outputs, static_cast<DataType>(-1));
    int32_t const status = buildOf(plugin)->getOutputDataTypes(out.data(), outputs, in.data(), inputs);
    for (int32_t i = 0; i < outputs; ++i)
    {
        outputTypes[i] = static_cast<int32_t>(out[i]);
    }
    return status;
}

// Of shapes as in expressionsOf: the status, then "N,512;B,2,16".
HARNESS_API char const* harness_output_shapes(IPluginV3* plugin, char const* shapes, int32_t outputs)
{
    Sizes sizes;
    std::vector<DimsExprs> const in = expressionsOf(shapes, sizes);
    std::vector<DimsExprs> out(outputs);
    int32_t const status = buildOf(plugin)->getOutputShapes(
        in.data(), static_cast<int32_t>(in.size()), nullptr, 0, out.data(), outputs, sizes);
    std::ostringstream text;
    text << status << '|';
    for (int32_t i = 0; status == 0 && i < outputs; ++i)
    {
        text << (i == 0 ? "" : ";");
        for (int32_t j = 0; j < out[i].nbDims; ++j)
        {
            text << (j == 0 ? "" : ",") << (out[i].d[j] == nullptr ? "?" : valueOf(*out[i].d[j]).text);
        }
    }
    return answer(text.str());
}

HARNESS_API int32_t harness_supports(
    IPluginV3* plugin, int32_t position, int32_t inputs, int32_t outputs, Tensor const* tensors)
{
    return buildOf(plugin)->supportsFormatCombination(
        position, dynamicDescs(tensors, inputs + outputs).data(), inputs, outputs);
}

HARNESS_API int32_t harness_configure(IPluginV3* plugin, int32_t inputs, int32_t outputs, Tensor const* tensors)
{
    std::vector<DynamicPluginTensorDesc> const descs = dynamicDescs(tensors, inputs + outputs);
    return buildOf(plugin)->configurePlugin(descs.data(), inputs, descs.data() + inputs, outputs);
}

HARNESS_API int64_t harness_workspace(IPluginV3* plugin, int32_t inputs, int32_t outputs, Tensor const* tensors)
{
    std::vector<DynamicPluginTensorDesc> const descs = dynamicDescs(tensors, inputs + outputs);
    return static_cast<int64_t>(
        buildOf(plugin)->getWorkspaceSize(descs.data(), inputs, descs.data() + inputs, outputs));
}

// How many tactics there are, or -1: it fails to list them.
HARNESS_API int32_t harness_tactics(IPluginV3* plugin)
{
    int32_t const count = buildOf(plugin)->getNbTactics();
    std::vector<int32_t> tactics(count);
    return buildOf(plugin)->getValidTactics(tactics.data(), count) == 0 ? count : -1;
}

// Tactic 0 is what TensorRT sets where a plugin has none of its own.
HARNESS_API int32_t harness_set_tactic(IPluginV3* plugin)
{
    return runtimeOf(plugin)->setTactic(0);
}

HARNESS_API int32_t harness_on_shape_change(IPluginV3* plugin, int32_t inputs, int32_t outputs, Tensor const* tensors)
{
    std::vector<PluginTensorDesc> const descs = staticDescs(tensors, inputs + outputs);
    return runtimeOf(plugin)->onShapeChange(descs.data(), inputs, descs.data() + inputs, outputs);
}

// `addresses` null: null for all memory, so that a plugin that touches it, or launches anything, fails.
HARNESS_API int32_t harness_enqueue(
    IPluginV3* plugin, int32_t inputs, int32_t outputs, Tensor const* tensors, void* const* addresses, void* stream)
{
    std::vector<PluginTensorDesc> const descs = staticDescs(tensors, inputs + outputs);
    std::vector<void*> memory(inputs + outputs, nullptr);
    if (addresses != nullptr)
    {
        memory.assign(addresses, addresses + inputs + outputs);
    }
    return runtimeOf(plugin)->enqueue(descs.data(), descs.data() + inputs, memory.data(), memory.data() + inputs,
        nullptr, static_cast<cudaStream_t>(stream));
}
