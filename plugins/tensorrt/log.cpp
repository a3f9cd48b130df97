#include "tensorrt/log.h"

#include <atomic>
#include <cstdio>

namespace trtllm_shadowkv::tensorrt
{
namespace
{

std::atomic<nvinfer1::ILoggerFinder*> theFinder{nullptr};

} // namespace

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    theFinder = finder;
}

void logError(std::string const& line) noexcept
{
    nvinfer1::ILoggerFinder* const finder = theFinder;
    nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr)
    {
        logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
    }
    else
    {
        std::fprintf(stderr, "%s\n", line.c_str());
    }
}

} // namespace trtllm_shadowkv::tensorrt
