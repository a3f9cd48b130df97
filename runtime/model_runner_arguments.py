"""Arguments of TensorRT-LLM's ModelRunner: what they mean here, and what is refused by name."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from trtllm_shadowkv.errors import ConfigError, RequestError, ShadowKVError, nearest
from trtllm_shadowkv.sampling_params import SamplingParams

_ANSWERS = "use num_return_sequences for several sampled answers"
_MEMORY = "use device_memory=BYTES, and host_memory=BYTES for the values of sealed tokens"

# Arguments of TensorRT-LLM's from_dir and generate that this engine cannot honour: the values (beside None) that ask
# for nothing, or for what is so anyway, and what to do instead where there is something.
REFUSED_BY_FROM_DIR: dict[str, tuple[tuple[Any, ...], str]] = {
    "cross_kv_cache_fraction": ((), ""),
    "cuda_graph_mode": ((True, False), ""),
    "debug_mode": ((False,), ""),
    "device_ids": ((), "choose the GPU with CUDA_VISIBLE_DEVICES"),
    "eagle_choices": ((), ""),
    "eagle_dynamic_tree_max_top_k": ((), ""),
    "eagle_posterior_threshold": ((), ""),
    "eagle_use_dynamic_tree": ((False,), ""),
    "enable_chunked_context": ((True, False), ""),  # prompts are always read in stretches
    "enable_context_fmha_fp32_acc": ((True, False), ""),  # sums are always float32
    "fail_fast_on_attention_window_too_large": ((True, False), ""),
    "gather_generation_logits": ((False,), "ask generate for output_log_probs"),
    "gpu_weights_percent": ((1,), "all weights are on the GPU"),
    "is_enc_dec": ((False,), ""),
    "is_orchestrator_mode": ((False,), ""),
    "kv_cache_enable_block_reuse": ((False,), ""),
    "kv_cache_free_gpu_memory_fraction": ((), _MEMORY),
    "logits_processor_map": ((), ""),
    "lookahead_config": ((), ""),
    "lora_ckpt_source": (("hf", "nemo"), ""),
    "lora_dir": ((), "merge the adapter into the model's weights and build it again"),
    "max_attention_window_size": ((), "use window=TOKENS for the newest tokens that sealed rows keep exactly"),
    "max_beam_width": ((1,), _ANSWERS),
    "max_tokens_in_paged_kv_cache": ((), _MEMORY),
    "medusa_choices": ((), ""),
    "mm_embedding_offloading": ((False,), ""),
    "multi_block_mode": ((True,), ""),
    "rank": ((0,), "one process and one GPU run the engine"),
    "sink_token_length": ((0,), "outlier chunks, chunk 0 among them, are kept exactly as the engine was built"),
    "stream": ((), ""),
    "use_gpu_direct_storage": ((False,), ""),
    "use_runtime_defaults": ((True, False), ""),
    "use_variable_beam_width_search": ((False,), ""),
}
REFUSED_BY_GENERATE: dict[str, tuple[tuple[Any, ...], str]] = {
    "beam_search_diversity_rate": ((0,), ""),
    "beam_width_array": ((), _ANSWERS),
    "cross_attention_masks": ((), ""),
    "draft_logits_list": ((), ""),
    "draft_tokens_list": ((), ""),
    "early_stopping": ((0, 1), ""),
    "encoder_input_features": ((), ""),
    "encoder_input_ids": ((), ""),
    "encoder_output_lengths": ((), ""),
    "input_token_extra_ids": ((), ""),
    "language_adapter_uids": ((), ""),
    "length_penalty": ((0, 1), ""),
    "logits_processor_names": ((), ""),
    "lookahead_config": ((), ""),
    "lora_uids": ((), "merge the adapter into the model's weights and build it again"),
    "max_attention_window_size": ((), "use window=TOKENS of from_dir"),
    "mm_embedding_offloading": ((False,), ""),
    "mrope_params": ((), ""),
    "no_repeat_ngram_size": ((0, 1 << 30), "use repetition_penalty, presence_penalty or frequency_penalty"),
    "num_beams": ((1,), _ANSWERS),
    "output_cum_log_probs": ((False,), "ask for output_log_probs and sum them over the last axis"),
    "output_generation_logits": ((False,), "ask for output_log_probs"),
    "position_ids": ((), "positions are those of the tokens in the prompt"),
    "prompt_table": ((), ""),
    "prompt_tasks": ((), ""),
    "return_all_generated_tokens": ((True, False), ""),  # every yield has them
    "sink_token_length": ((0,), ""),
    "skip_cross_attn_blocks": ((), ""),
    "stopping_criteria": ((), "use stop_words_list, or stop iterating over a stream"),
    "top_p_decay": ((1,), ""),
    "top_p_min": ((1e-6,), ""),
    "top_p_reset_ids": ((-1,), ""),
    "use_beam_hyps": ((True, False), ""),
}
SAMPLING = {
    "frequency_penalty": "frequency_penalty",
    "min_length": "min_tokens",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
    "num_return_sequences": "n",
    "presence_penalty": "presence_penalty",
    "random_seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Sampling keywords of ``generate``, and the fields of :class:`SamplingParams` that they set."""
_THEIRS = {"n": "num_return_sequences", "seed": "random_seed", "max_tokens": "max_new_tokens"}
OTHERS = (
    "max_new_tokens",
    "end_id",
    "pad_id",
    "bad_words_list",
    "stop_words_list",
    "return_dict",
    "output_sequence_lengths",
    "output_log_probs",
)


def sampling_params(asked: dict[str, Any], max_new_tokens: int, end_id: int | None) -> SamplingParams:
    """What is asked of sampling in :class:`SamplingParams`' terms, and its errors in TensorRT-LLM's."""
    values = {ours: asked[theirs] for theirs, ours in SAMPLING.items() if theirs in asked}
    values.setdefault("seed", secrets.randbits(63))
    try:
        if values.get("top_k") and values.get("top_p") == 0:
            del values["top_p"]
        return SamplingParams(
            **values,
            max_tokens=max_new_tokens,
            ignore_eos=end_id is not None,
            stop_token_ids=[end_id] if end_id is not None and end_id >= 0 else None,
            logprobs=0 if asked.get("output_log_probs") else None,
        )
    except RequestError as e:
        raise RequestError(" ".join(_THEIRS.get(word, word) for word in str(e).split(" "))) from None


def fields_of(config: Any) -> dict[str, Any]:
    """Fields of a sampling_config that are not None."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        found = dict(config)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        found = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    else:
        raise RequestError(f"sampling_config is {type(config).__name__}", "a mapping or a dataclass")
    return {name: value for name, value in found.items() if value is not None}


def refuse(
    where: str,
    name: str,
    value: Any,
    refused: dict[str, tuple[tuple[Any, ...], str]],
    error: type[ConfigError] | type[RequestError],
) -> None:
    """Raise unless an argument of TensorRT-LLM's is known and asks for nothing."""
    if name not in refused:
        known = [*OTHERS, *SAMPLING]
        raise error(f"{where}: unknown parameter {shown(name)}{nearest(str(name)[:64], known)}")
    neutral, todo = refused[name]
    if value is None or (isinstance(value, bool | int | float | str) and value in neutral):
        return
    raise error(f"{where}: {name} = {shown(value)} is not supported by this engine", todo=todo or "leave it out")


def whole(name: str, value: Any, low: int, high: int, error: type[ShadowKVError] = RequestError) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise error(f"{name} is {shown(value)}", f"a whole number from {low} to {high}")
    return int(value)


def shown(value: Any) -> str:
    """A short repr, in one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a stranger's object, or an int beyond 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
