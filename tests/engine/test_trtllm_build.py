"""Engines of TensorRT-LLM's trtllm-build with our model class beside our own builder's, of the same checkpoints.

Both have the same network, for which TensorRT takes the same kernels where it has the same measurements: not one bit of
the logits differs then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.engine.conftest import BUILDS, PROMPT, TOKENS, Made, once
from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.build import tensorrt_engine, timing_cache
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.eval.forced import Floats, agreement, forced_logits
from trtllm_shadowkv.runtime.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM's Python package tensorrt_llm is not here"
)
RAGGED = (10, 300, 900, 1100, 57, 128, 700, 1500)
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "TRTLLM_SHADOWKV_CONFIG"


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run a Python module; all it says is printed, which pytest shows where the test fails."""
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(done.stdout)
    print(f"{' '.join(map(str, command[:2]))}: exit status {done.returncode} after {perf_counter() - start:.0f} s")
    assert done.returncode == 0


def convert(model: Path, checkpoint: Path, dtype: str) -> None:
    where = ("--model-dir", model, "--output-dir", checkpoint, "--dtype", dtype)
    run("trtllm_shadowkv", "convert-checkpoint", *where)


def trtllm_build(checkpoint: Path, output: Path, build: BuildConfig, *, settings: bool = True) -> None:
    """The command of docs/trtllm.md, for an engine like one of our own builder's.

    Args:
        build: settings of that one.
        settings: name ShadowKV's settings in the environment; without it the checkpoint has them.
    """
    work = output.resolve().with_name(f"{output.name}.work")  # and where it leaves its timing cache
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    env = {key: value for key, value in os.environ.items() if key != SETTINGS}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])  # it runs elsewhere
    if settings:
        file = work / "shadowkv.yaml"
        file.write_text(json.dumps({"shadowkv": build.shadowkv.to_dict()}))
        env[SETTINGS] = str(file)
    # Our builder's measurements, if it keeps any: the same kernels are then chosen for the same layers.
    measured, cache = work / "measured.cache", tensorrt_engine.prepare(build).timing_cache
    measured.write_bytes(b"" if cache is None else timing_cache.read(cache, print))
    model_file = subprocess.run(
        [sys.executable, "-m", "trtllm_shadowkv", "model-file"], capture_output=True, text=True, check=True
    )
    limits = ("max_batch_size", "max_seq_len", "max_num_tokens")
    run(
        "tensorrt_llm.commands.build",
        *("--checkpoint_dir", checkpoint.resolve(), "--output_dir", work / "engine"),
        *("--model_cls_file", model_file.stdout.strip(), "--model_cls_name", "ShadowKVForCausalLM"),
        *(word for name in limits for word in (f"--{name}", str(getattr(build, name)))),
        *("--workers", "1", "--input_timing_cache", measured),
        *("--gpt_attention_plugin", "disable", "--use_paged_context_fmha", "disable", "--kv_cache_type", "disabled"),
        cwd=work,
        env=env,
    )
    (work / "engine").rename(output)
    shutil.rmtree(work)


@pytest.fixture(scope="session")
def checkpoint(shared: Path, smollm2: Path) -> Made:
    """SmolLM2 as a checkpoint of TensorRT-LLM's, by type."""
    return lambda dtype: once(shared / f"checkpoint-{dtype}", lambda path: convert(smollm2, path, dtype))


@contextmanager
def own_measurements(folder: Path) -> Iterator[None]:
    """TensorRT's timing cache in a folder of its own: of builds at the same time, the last one's stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(scope="session")
def own_engine(shared: Path, checkpoint: Made) -> Made:
    """What our own builder makes of the checkpoint: 8 rows of 8,192 tokens."""

    def make(dtype: str) -> Path:
        build, weights = (
            replace(BUILDS[dtype], max_batch_size=8, max_seq_len=8192, max_num_tokens=4096),
            checkpoint(dtype),
        )
        with own_measurements(shared / f"measurements-{dtype}"):
            return once(
                shared / f"own-{dtype}", lambda path: build_engine(weights, path, build, trtllm_checkpoint=True)
            )

    return make


@pytest.fixture(scope="session")
def trtllm_engine(shared: Path, own_engine: Made, checkpoint: Made) -> Made:
    """What trtllm-build makes of it, with the settings of our own engine of that type."""

    def make(dtype: str) -> Path:
        ours, weights = EngineDirectory.open(own_engine(dtype)), checkpoint(dtype)
        with own_measurements(shared / f"measurements-{dtype}"):
            return once(shared / f"trtllm-{dtype}", lambda path: trtllm_build(weights, path, ours.build))

    return make


def generated(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    assert isinstance(outputs, list)
    return [list(o.outputs[0].token_ids) for o in outputs]


def require_same(
    engines: tuple[Path, Path], prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> None:
    """The same greedy tokens; where they part, both engines' logits of the two candidates are printed."""
    parted = 0
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        if own == other:
            continue
        parted += 1
        at = next(i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
        for path in engines:
            with LLM(path) as llm:
                logits = forced_logits(llm, prompt, own[: at + 1])[0][-1]
            a, b = (float(logits[token]) for token in (own[at], other[at]))
            print(
                f"prompt of {len(prompt)}: token {at} of {len(own)} is {own[at]} or {other[at]}; "
                f"{path.name} has logits {a:.5f} and {b:.5f}, gap {a - b:+.5f}"
            )
    print(f"the same tokens after {len(prompts) - parted} of {len(prompts)} prompts")
    assert parted == 0, f"other tokens after {parted} of {len(prompts)} prompts"


def require_equal(what: str, ours: Floats, theirs: Floats) -> None:
    same = agreement(ours, theirs)
    error = float((np.linalg.norm(theirs - ours, axis=1) / np.linalg.norm(ours, axis=1)).mean())
    print(f"{what}: top-1 {same.top1:.4f}, relative L2 {error:.5f}, KL {same.kl:.2e}, {same.positions} positions")
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_our_builders(own_engine: Made, trtllm_engine: Made, text: list[int], dtype: str) -> None:
    paths = own_engine(dtype), trtllm_engine(dtype)
    opened = [EngineDirectory.open(path) for path in paths]
    assert not opened[1].has_manifest
    assert opened[0].build == opened[1].build
    found: dict[str, list[Floats]] = {"dense": [], "shadowkv": []}
    for path in paths:
        with LLM(path) as llm:
            for mode, logits in found.items():
                attention = AttentionParams(mode=mode)  # type: ignore[arg-type]
                logits.append(forced_logits(llm, text[:PROMPT], text[PROMPT:TOKENS], attention)[0])
    for mode, (ours, theirs) in found.items():
        require_equal(f"trtllm-build {dtype} {mode}", ours, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tokens_are_our_builders(own_engine: Made, trtllm_engine: Made, text: list[int], dtype: str) -> None:
    """200 after 4,000 of a real text, which are sealed, and 80 after each of a batch of short prompts."""
    paths = own_engine(dtype), trtllm_engine(dtype)
    long, short = [text[:4000]], [text[41 * i : 41 * i + n] for i, n in enumerate(RAGGED)]
    found = []
    for path in paths:
        with LLM(path) as llm:
            found.append(generated(llm, long, 200) + generated(llm, short, 80))
    require_same(paths, long + short, *found)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "ShadowKVForCausalLM"])
def test_model_runner(
    own_engine: Made, checkpoint: Made, trtllm_engine: Made, text: list[int], tmp_path: Path, architecture: str
) -> None:
    """Of a stock checkpoint, and of one of our own architecture, which holds ShadowKV's settings."""
    ours, weights = own_engine("bfloat16"), checkpoint("bfloat16")
    config = json.loads((weights / "config.json").read_text())
    assert config["architecture"] == "LlamaForCausalLM"
    if architecture == "LlamaForCausalLM":
        path = trtllm_engine("bfloat16")
    else:
        build = EngineDirectory.open(ours).build
        own, path = tmp_path / "checkpoint", tmp_path / "engine"
        own.mkdir()
        (own / "rank0.safetensors").symlink_to(weights.resolve() / "rank0.safetensors")
        changes = {"architecture": architecture, "shadowkv": build.shadowkv.to_dict()}
        (own / "config.json").write_text(json.dumps(config | changes))
        with own_measurements(ours.with_name("measurements-bfloat16")):
            trtllm_build(own, path, build, settings=False)
        assert EngineDirectory.open(path).build == build
    written = json.loads((path / "config.json").read_text())["pretrained_config"]
    assert written["architecture"] == architecture

    prompts = [text[41 * i : 41 * i + n] for i, n in enumerate(RAGGED)]
    with ModelRunner.from_dir(path) as runner:
        output = runner.generate([torch.tensor(p) for p in prompts], max_new_tokens=80, end_id=-1, pad_id=0)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (len(prompts), 1, max(RAGGED) + 80)
    ran = [row[0, len(prompt) :][:80].tolist() for row, prompt in zip(output, prompts, strict=True)]
    with LLM(path) as llm:
        assert ran == generated(llm, prompts, 80)
    with LLM(ours) as llm:
        require_same((ours, path), prompts, generated(llm, prompts, 80), ran)


def write_llama(directory: Path, layers: int = 2, vocab: int = 128256, device: str = "cuda") -> None:
    """A Hugging Face directory of Llama-3.1-8B's shape but for the number of layers; random bfloat16 weights."""
    hidden, inner, heads, kv_heads, size = 4096, 14336, 32, 8, 128
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": rope | {"original_max_position_embeddings": 8192},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{attention}.{name}_proj": (kv_heads * size, hidden) for name in "kv"}
        shapes |= {f"{attention}.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj"] = (hidden, inner)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, mean: float = 0.0) -> torch.Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return x.normal_(mean, 0.02, generator=generator).cpu()

    weights = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention")]
    weights |= {f"{name}.weight": random(hidden, mean=1.0) for name in (*norms, "model.norm")}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def test_shape_of_llama_8b(tmp_path: Path) -> None:
    """Two layers, whose prompts of random tokens are read in one or two stretches, and sealed but for the short."""
    model, weights, ours, theirs = (tmp_path / name for name in ("model", "checkpoint", "ours", "trtllm"))
    try:
        write_llama(model)
        settings = ShadowKVConfig(top_k=64, outliers=8, dense_limit=1024)
        build = BuildConfig("bfloat16", 4, 4096, 2048, backend="tensorrt", shadowkv=settings)
        start = perf_counter()
        with own_measurements(tmp_path / "measurements"):
            build = build_engine(model, ours, build, engine_only=True).build
            print(f"our own builder: {perf_counter() - start:.0f} s")
            convert(model, weights, "bfloat16")
            trtllm_build(weights, theirs, build)
        assert EngineDirectory.open(theirs).build == build
        random = np.random.default_rng(0)
        prompts = [random.integers(0, 128256, n).tolist() for n in (300, 2500, 1100, 40)]
        tokens, logits = [], []
        for path in (ours, theirs):
            with LLM(path) as llm:
                tokens.append(generated(llm, prompts, 48))
                logits.append(forced_logits(llm, prompts[1], prompts[2][:100])[0])
        require_equal("trtllm-build, Llama-3.1-8B's shape", *logits)
        require_same((ours, theirs), prompts, *tokens)
    finally:
        for path in (model, weights, ours, theirs):  # 15 GB
            shutil.rmtree(path, ignore_errors=True)
