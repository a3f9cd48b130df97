// The attributes that each of the three ops carries: names.py lists them.
#pragma once

#include "NvInferRuntime.h"
#include "state/c_api.h"

#include <cstdint>
#include <vector>

namespace trtllm_shadowkv::tensorrt
{

struct Attributes
{
    int32_t layer;
    int32_t numHeads;
    int32_t numKvHeads;
    int32_t headSize;
    int32_t chunkSize;
    int32_t rank;
    int32_t topK;
    int32_t outliers;

    int32_t queryWidth() const
    {
        return numHeads * headSize;
    }

    int32_t qkvWidth() const
    {
        return (numHeads + 2 * numKvHeads) * headSize;
    }
};

// All of `fields`, each once, as one int32 or int64. Throws Failure that names the field.
Attributes attributesOf(nvinfer1::PluginFieldCollection const& fields);

// What a state must be made for, see CudaState::requireOpsOf().
tsk_state_config opsOf(Attributes const& attributes, nvinfer1::DataType type);

// Names and types, for a creator; with values, for an engine.
std::vector<nvinfer1::PluginField> fieldsOf(Attributes const* values);

} // namespace trtllm_shadowkv::tensorrt
