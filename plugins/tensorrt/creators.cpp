// What TensorRT looks for in a library of plugins.
#include "tensorrt/log.h"
#include "tensorrt/ops.h"

extern "C" TSK_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    trtllm_shadowkv::tensorrt::setFinder(finder);
}

extern "C" TSK_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    using namespace trtllm_shadowkv::tensorrt;
    static Creator landmarkTopK{kLANDMARK_TOPK_OP};
    static Creator keyReconstruct{kKEY_RECONSTRUCT_OP};
    static Creator sparseAttention{kSPARSE_ATTENTION_OP};
    static nvinfer1::IPluginCreatorInterface* const all[] = {&landmarkTopK, &keyReconstruct, &sparseAttention};
    count = 3;
    return all;
}
