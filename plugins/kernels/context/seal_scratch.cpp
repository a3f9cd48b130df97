#include "kernels/context/seal_scratch.h"

namespace trtllm_shadowkv::kernels
{

int64_t sealScratchBytes(View const& view, int32_t chunks)
{
    return sealLayout(view, chunks).bytes;
}

} // namespace trtllm_shadowkv::kernels
