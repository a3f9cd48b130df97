// Lines into the log of the engine, or of the builder, that called a plugin.
#pragma once

#include "NvInferRuntime.h"

#include <string>

namespace trtllm_shadowkv::tensorrt
{

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept;

// Never throws; to standard error where TensorRT has given no logger.
void logError(std::string const& line) noexcept;

} // namespace trtllm_shadowkv::tensorrt
