"""``trtllm-shadowkv plan``: what fits on a GPU, how fast it decodes, and whether ShadowKV is worth it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, nearest
from trtllm_shadowkv.hardware import (
    GPUS,
    MODELS,
    Gpu,
    ModelShape,
    Shape,
    check_positive,
    custom_gpu,
    gpu_by_name,
    model_by_name,
    model_from_directory,
    weight_bytes,
)
from trtllm_shadowkv.plan import (
    Comparison,
    LayerTime,
    Step,
    Workload,
    compare,
    largest_batch,
    longest_context,
    paper_bandwidth,
    paper_memory_saving,
    shadow_step,
)
from trtllm_shadowkv.verdict import gigabytes, notes, variants, verdict
from trtllm_shadowkv.workload import HOST_MEMORY

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
_SHAPE = "Model by numbers"
_GPU = "GPU"
_KV = "ShadowKV"


def plan(
    model: Annotated[str | None, typer.Option(help=f"A known model: {', '.join(MODELS)}.")] = None,
    model_dir: Annotated[
        str | None, typer.Option(help="A Hugging Face model directory; reads its config.json.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    num_heads: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    head_size: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    hidden_size: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    intermediate_size: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    vocab_size: Annotated[int | None, typer.Option(rich_help_panel=_SHAPE)] = None,
    gpu: Annotated[
        str | None, typer.Option(rich_help_panel=_GPU, help=f"A known GPU: {', '.join(GPUS)}; else h200.")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(rich_help_panel=_GPU, help="GB (1e9 bytes).")] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option(rich_help_panel=_GPU, help="GB/s that a copy reaches in GPU memory.")
    ] = None,
    link_bandwidth: Annotated[
        float | None, typer.Option(rich_help_panel=_GPU, help="GB/s that reads of pinned host memory reach.")
    ] = None,
    tensor_tflops: Annotated[float | None, typer.Option(rich_help_panel=_GPU, help="Dense bfloat16 TFLOP/s.")] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(rich_help_panel=_GPU, help="GB of host memory for values (see doctor); else 123.5, of 128 GiB."),
    ] = None,
    context_length: Annotated[int, typer.Option(help="Tokens of a row, prompt and generated.")] = 131072,
    batch_size: Annotated[int | None, typer.Option(help="Rows; else as many as fit.")] = None,
    rank: Annotated[int | None, typer.Option(rich_help_panel=_KV, help="Rank of the keys; else 160.")] = None,
    top_k: Annotated[int, typer.Option(rich_help_panel=_KV, help="Chunks selected for each KV head.")] = 256,
    outliers: Annotated[int, typer.Option(rich_help_panel=_KV, help="Chunks kept exactly for each KV head.")] = 48,
    chunk_size: Annotated[int, typer.Option(rich_help_panel=_KV, help="Tokens of a chunk: 8 or 16.")] = 8,
    window: Annotated[int, typer.Option(rich_help_panel=_KV, help="Newest tokens kept exactly.")] = 256,
    cache_factor: Annotated[int, typer.Option(rich_help_panel=_KV, help="Chunk cache in units of top-k.")] = 2,
    value_dtype: Annotated[str, typer.Option(rich_help_panel=_KV, help=", ".join(ELEMENT_BYTES))] = "bfloat16",
    landmark_dtype: Annotated[str, typer.Option(rich_help_panel=_KV, help=", ".join(ELEMENT_BYTES))] = "bfloat16",
    hit_rate: Annotated[
        float | None, typer.Option(rich_help_panel=_KV, help="Of the chunk cache, 0 to 1; else as measured.")
    ] = None,
    spare_gpu_values: Annotated[
        bool, typer.Option("--spare-gpu-values", rich_help_panel=_KV, help="Values go to spare GPU memory first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; bytes and seconds.")] = False,
) -> None:
    """Estimate memory, largest batch and decode speed, beside dense attention, by arithmetic alone."""
    numbers = {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    model_name, shape = _model(model, model_dir, numbers)
    if host_memory is not None:
        check_positive("--host-memory", host_memory)
    w = Workload(
        shape,
        _gpu(
            gpu,
            memory=(gpu_memory, 1e9),
            bandwidth=(gpu_bandwidth, 1e9),
            link=(link_bandwidth, 1e9),
            tensor=(tensor_tflops, 1e12),
        ),
        ShadowKVConfig(
            chunk_size=chunk_size, rank=rank, top_k=top_k, outliers=outliers, window=window, cache_factor=cache_factor
        ),
        context_length,
        host_memory=HOST_MEMORY if host_memory is None else host_memory * 1e9,
        value_bytes=_element_bytes("--value-dtype", value_dtype),
        landmark_bytes=_element_bytes("--landmark-dtype", landmark_dtype),
        hit_rate=hit_rate,
        spare_tier=spare_gpu_values,
    )
    c = compare(w, batch_size)
    if as_json:
        typer.echo(json.dumps(_as_json(model_name, w, c), indent=2))
    else:
        typer.echo("\n".join(_report(model_name, w, c, batch_size)))


def _model(name: str | None, directory: str | None, numbers: dict[str, int | None]) -> tuple[str, Shape]:
    given = {key: value for key, value in numbers.items() if value is not None}
    if (name is not None) + (directory is not None) + bool(given) != 1:
        raise ConfigError(
            "no model is given" if name is None and directory is None and not given else "the model is given twice",
            f"one of --model (such as {next(iter(MODELS))}), --model-dir, or the shape's numbers",
        )
    if name is not None:
        return name.lower(), model_by_name(name)
    if directory is not None:
        return directory, model_from_directory(directory)
    if missing := [f"--{key.replace('_', '-')}" for key in numbers if key not in given]:
        raise ConfigError(f"{', '.join(missing)} missing", "all numbers of the model's shape")
    return "custom", ModelShape(**given, tied=False)


def _gpu(name: str | None, **figures: tuple[float | None, float]) -> Gpu:
    if name is None and all(value is None for value, _ in figures.values()):
        return gpu_by_name("h200")
    return custom_gpu(name, **{key: None if value is None else value * unit for key, (value, unit) in figures.items()})


def _element_bytes(option: str, name: str) -> int:
    if name not in ELEMENT_BYTES:
        raise ConfigError(
            f"{option} is {name!r}{nearest(name, tuple(ELEMENT_BYTES))}", f"one of {', '.join(ELEMENT_BYTES)}"
        )
    return ELEMENT_BYTES[name]


def _report(model_name: str, w: Workload, c: Comparison, batch_size: int | None) -> list[str]:
    m, g, kv = w.model, w.gpu, w.kv
    lines = [
        f"{model_name} on {g.name}, {w.tokens:,} tokens a row (GB = 1e9 bytes)",
        f"  model     {m.num_layers} layers, {m.num_heads} heads, {m.num_kv_heads} KV heads of {m.head_size}; "
        f"weights {gigabytes(weight_bytes(m))}",
        f"  GPU       {gigabytes(g.memory)}, {g.bandwidth / 1e12:.2f} TB/s, host link {g.link / 1e9:.0f} GB/s, "
        f"{g.tensor / 1e12:.0f} TFLOP/s; host memory {gigabytes(w.host_memory)}",
        f"  settings  rank {kv.rank}, top-k {kv.top_k}, outliers {kv.outliers}, chunk {kv.chunk_size}, "
        f"window {kv.window}, cache {kv.cache_factor} x top-k",
        "",
        *_memory_table(c),
        "",
        *_decode_table(c),
    ]
    if c.layer:
        lines += ["", *_layer_lines(c.layer), "", *_variants_table(w), "", *_paper_lines(w)]
    return [*lines, "", verdict(w, c), *(f"- {note}" for note in notes(w, c, batch_size))]


def _memory_table(c: Comparison) -> list[str]:
    need, rows = c.bytes, c.shadow.rows if c.shadow else 1
    parts = {
        "low-rank keys (A, B)": need.factor_a + need.factor_b,
        "landmarks": need.landmarks,
        "scales of fp8": need.scales,
        "outlier chunks": need.outliers,
        "chunk cache": need.cache,
        "live pages": need.live,
        "together on the GPU": need.gpu,
        "values": need.values,
    }
    count = "1 row" if rows == 1 else f"{rows} rows"
    lines = [f"{'memory, GB':34}{'a row':>9}{count:>12}"]
    lines += [f"  {name:32}{size / 1e9:9.3f}{rows * size / 1e9:12.2f}" for name, size in parts.items() if size]
    return [*lines, f"  {'one prompt in prefill':32}{'':9}{need.prefill / 1e9:12.2f}"] if need.prefill else lines


def _decode_table(c: Comparison) -> list[str]:
    largest, limit = (c.batch.rows, c.batch.limit) if c.batch else (c.dense["bfloat16"].largest, "gpu")
    table: list[tuple[str, Step | None, int, str, float | None]] = [("ShadowKV", c.shadow, largest, limit, None)]
    table += [(f"dense, {name} keys, values", d.step, d.largest, "gpu", c.gains[name]) for name, d in c.dense.items()]
    lines = [f"{'decode':34}{'rows':>9}{'at most':>12}{'limit':>8}{'ms/step':>10}{'tokens/s':>10}{'gain':>8}"]
    for name, step, most, what, gain in table:
        time = f"{step.seconds * 1e3:10.2f}{step.tokens_per_second:10,.0f}" if step else f"{'-':>10}{'-':>10}"
        gained = f"{gain:.2f}x" if gain else "-"
        lines.append(f"  {name:32}{step.rows if step else 0:9}{most:12}{what:>8}{time}{gained:>8}")
    return lines


def _layer_lines(layer: LayerTime) -> list[str]:
    parts = {key: value for key, value in asdict(layer).items() if key not in ("total", "waiting")}
    return [
        f"one layer's attention: {layer.total * 1e6:,.0f} us, of which {layer.waiting * 1e6:,.0f} wait for the link",
        "  " + ", ".join(f"{key} {value * 1e6:,.0f}" for key, value in parts.items()) + " (they overlap)",
    ]


def _paper(w: Workload) -> dict[str, float]:
    """The paper's two formulas with this workload's figures."""
    kv, m, g = w.kv, w.model, w.gpu
    assert kv.rank is not None
    width = m.num_kv_heads * m.head_size
    return {
        "memory_saving": paper_memory_saving(width, kv.chunk_size, w.tokens, kv.top_k, kv.outliers, kv.rank),
        "equivalent_bandwidth": paper_bandwidth(
            g.bandwidth, g.link, kv.chunk_size, w.tokens, kv.top_k, kv.outliers, w.hits
        ),
    }


def _paper_lines(w: Workload) -> list[str]:
    figures = _paper(w)
    saving, bandwidth = figures["memory_saving"], figures["equivalent_bandwidth"]
    return [
        f"by the paper's formulas, attention alone: {saving:.2f}x less GPU memory for keys and values, and as fast as",
        f"  if GPU memory gave {bandwidth / 1e12:.1f} TB/s ({bandwidth / w.gpu.bandwidth:.1f}x)",
    ]


def _variants_table(w: Workload) -> list[str]:
    lines = [f"{'at the largest batch':34}{'rows':>9}{'':12}{'limit':>8}{'ms/step':>10}{'tokens/s':>10}"]
    for name, changed in variants(w):
        best = largest_batch(changed)
        if best.rows:
            step = shadow_step(changed, best.rows, best.on_host)
            time = f"{step.seconds * 1e3:10.2f}{step.tokens_per_second:10,.0f}"
            lines.append(f"  {name:32}{best.rows:9}{'':12}{best.limit:>8}{time}")
    return lines


def _as_json(model_name: str, w: Workload, c: Comparison) -> dict[str, Any]:
    def step(s: Step | None) -> dict[str, Any] | None:
        return {**asdict(s), "seconds": s.seconds, "tokens_per_second": s.tokens_per_second} if s else None

    return {
        "model": {"name": model_name, "weight_bytes": weight_bytes(w.model)},
        "gpu": asdict(w.gpu),
        "shadowkv": w.kv.to_dict(),
        "context_length": w.tokens,
        "host_memory": w.host_memory,
        "hit_rate": w.hits if c.layer else None,
        "bytes": {**asdict(c.bytes), "gpu": c.bytes.gpu, "host": c.bytes.host},
        "largest_batch": c.batch and asdict(c.batch),
        "longest_context": longest_context(w),
        "step": step(c.shadow),
        "layer": c.layer and asdict(c.layer),
        "paper": _paper(w) if c.layer else None,
        "dense": {name: {"largest_batch": d.largest, "step": step(d.step)} for name, d in c.dense.items()},
        "gain": c.gains,
        "verdict": {"kind": c.kind, "text": verdict(w, c)},
        "notes": notes(w, c, None),
    }
