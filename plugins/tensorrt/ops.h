// The three ops, each in a folder of its own with a README.
#pragma once

#include "tensorrt/plugin.h"

namespace trtllm_shadowkv::tensorrt
{

extern Op const kLANDMARK_TOPK_OP;
extern Op const kKEY_RECONSTRUCT_OP;
extern Op const kSPARSE_ATTENTION_OP;

} // namespace trtllm_shadowkv::tensorrt
