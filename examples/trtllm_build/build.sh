#!/bin/bash
# A Hugging Face Llama becomes an engine by TensorRT-LLM's own trtllm-build, with ShadowKV as its attention.
#
#   examples/trtllm_build/build.sh MODEL_DIR WORK_DIR [flags of trtllm-build, such as --max_seq_len 32768]
#
# On the GPU that the engine is for; TensorRT-LLM 0.15 to 1.2.1 and trtllm-shadowkv with its plugin library are
# installed. ShadowKV's settings: TRTLLM_SHADOWKV_CONFIG=FILE.yaml with a section shadowkv, else the defaults.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2
    exit 2
fi
model=$1 work=$2
shift 2

trtllm-shadowkv convert-checkpoint --model-dir "$model" --output-dir "$work/checkpoint" --dtype bfloat16

# The last three switch off what trtllm-build has on by default; docs/trtllm.md has the rest that is refused.
trtllm-build --checkpoint_dir "$work/checkpoint" --output_dir "$work/engine" \
    --model_cls_file "$(trtllm-shadowkv model-file)" --model_cls_name ShadowKVForCausalLM \
    --max_batch_size 8 --max_num_tokens 8192 --workers 1 \
    --gpt_attention_plugin disable --use_paged_context_fmha disable --kv_cache_type disabled "$@"

# trtllm-build leaves the tokenizer where it was; generate looks for it beside the engine.
find "$work/checkpoint" -maxdepth 1 -type f ! -name config.json ! -name '*.safetensors' -exec cp -t "$work/engine" {} +
ls -l "$work/engine"
