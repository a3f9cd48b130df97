"""What a plan means, in words: whether ShadowKV is worth it, what limits it, what could be tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtllm_shadowkv.hardware import weight_bytes
from trtllm_shadowkv.plan import Comparison, Step, Workload, longest_context
from trtllm_shadowkv.workload import GPU_RESERVE, HITS

_SOURCES = {
    "measured": "memory and link bandwidth were measured by this project on this GPU",
    "vendor": "the vendor's figures, bandwidths times the share that an H200 reaches of its own",
    "given": "figures given by you",
}


def gigabytes(size: float) -> str:
    """``1.2 GB``, of 1e9 bytes."""
    return f"{size / 1e9:,.1f} GB"


def verdict(w: Workload, c: Comparison) -> str:
    """One to three sentences: is ShadowKV worth it here, and why."""
    if c.kind == "weights":
        return (
            f"Does not fit: the weights take {gigabytes(weight_bytes(w.model))} of {gigabytes(w.gpu.memory)}, "
            f"and {gigabytes(GPU_RESERVE)} are reserved for everything else."
        )
    if c.kind == "short":
        return (
            f"Dense attention is what you get: rows up to the dense limit ({w.kv.dense_limit:,} tokens) are kept "
            "exactly, so ShadowKV saves no memory and gains no speed here."
        )
    if c.shadow is None:
        return _does_not_fit(w, c)
    mine = f"{c.shadow.tokens_per_second:,.0f} tokens/s with {c.shadow.rows} rows"
    dense = {
        name: f"dense {name} ({d.step.tokens_per_second:,.0f} tokens/s with {d.step.rows} rows)"
        for name, d in c.dense.items()
        if d.step
    }
    if c.kind == "dense":
        return f"Dense is faster for you: {dense['bfloat16']}; ShadowKV reaches {mine}. {_why_dense(w, c, c.shadow)}"
    if c.kind == "even":
        return f"No clear gain: {mine}, {dense['bfloat16']}. Dense attention is exact and simpler: prefer it."
    gains = {name: gain for name, gain in c.gains.items() if gain is not None}
    over = [f"{gain:.1f}x {dense[name]}" for name, gain in gains.items() if gain >= 1]
    behind = [dense[name] for name, gain in gains.items() if gain < 1]
    text = f"ShadowKV gains: {mine}, {' and '.join(over)}."
    return text + (f" But {behind[0]} is faster still." if behind else "")


def _does_not_fit(w: Workload, c: Comparison) -> str:
    left = f"; {gigabytes(w.budget)} of the GPU are left beside weights and reserve"
    what = {
        "staging": f"the keys and values of one prompt in prefill take {gigabytes(c.bytes.prefill)}{left}",
        "gpu": f"one prompt in prefill and one row take {gigabytes(c.bytes.prefill + c.bytes.gpu)}{left}",
        "host": f"one row's values take {gigabytes(c.bytes.host)}, host memory is {gigabytes(w.host_memory)}",
    }[c.kind]
    longest = longest_context(w)
    return (
        f"ShadowKV does not fit: {what}. "
        + (f"The longest context that fits has {longest:,} tokens. " if longest else "No context fits. ")
        + f"Dense attention holds {c.dense['bfloat16'].largest} rows in bfloat16, {c.dense['fp8'].largest} in fp8."
    )


def _why_dense(w: Workload, c: Comparison, shadow: Step) -> str:
    waiting = c.layer.waiting * w.model.num_layers / shadow.seconds if c.layer else 0.0
    if w.attended > w.tokens / 5:
        return f"The context is short: ShadowKV still attends to {w.attended:,} of its {w.tokens:,} tokens."
    if waiting > 0.2:
        return f"{waiting:.0%} of a step waits for the host link: fp8 values or a larger cache shorten that."
    return "These rows fit dense attention, and reading their keys and values is a small part of a step."


def notes(w: Workload, c: Comparison, batch_size: int | None = None) -> list[str]:
    """What the reader should know about the figures; ``batch_size``: rows asked for."""
    lines = []
    if c.batch and c.batch.rows and c.batch.limit == "host":
        by_gpu = int((w.budget - c.bytes.prefill) // c.bytes.gpu)
        lines.append(
            f"Host memory limits the batch: the GPU has room for {by_gpu} rows, "
            f"whose values would take {gigabytes(by_gpu * c.bytes.host)} of host memory."
        )
    if batch_size and c.shadow and batch_size > c.shadow.rows:
        lines.append(f"{batch_size} rows do not fit: ShadowKV's figures are for {c.shadow.rows}.")
    made_for = w.model.max_position_embeddings
    if made_for and w.tokens > made_for:
        lines.append(f"The model was made for {made_for:,} tokens.")
    if c.layer and w.hit_rate is None and w.hits < 1:
        measured = HITS[0][0] <= w.budget_share <= HITS[-2][0] and w.kv.cache_factor <= 8
        lines.append(
            f"Hit rate {w.hits:.2f}: {'measured' if measured else 'extrapolated from what was measured'} with "
            "SmolLM2-135M on 8K tokens of text. Give yours with --hit-rate."
        )
    lines.append(f"GPU: {_SOURCES[w.gpu.source]}. Times are a model fitted to Llama-3.1-8B on an H200: estimates.")
    return lines


def variants(w: Workload) -> list[tuple[str, Workload]]:
    """The settings as given and what could be tried, each on top of those before it."""
    steps: list[tuple[str, dict[str, Any]]] = [("+ fp8 values and landmarks", {"value_bytes": 1, "landmark_bytes": 1})]
    if w.hit_rate is None and w.kv.cache_factor < 4:
        steps.append(("+ chunk cache of 4 x top-k", {"kv": replace(w.kv, cache_factor=4)}))
    steps.append(("+ values in spare GPU memory", {"spare_tier": True}))
    found = [("as given", w)]
    for name, change in steps:
        changed = replace(found[-1][1], **change)
        if changed != found[-1][1]:
            found.append((name, changed))
    return found
