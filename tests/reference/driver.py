"""Drives a state's ops as a graph would, with queries, keys and values of the test's choice.

Layers do not feed each other here, so every layer is an independent trial, and nothing but the state is under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.reference.selection import chunk_scores
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.rope import RopeConfig
from trtllm_shadowkv.runtime.state import PADDING, State

NO_ROTATION = RopeConfig(10_000.0, "linear", 1e30)
"""Angles so small that every rotation leaves float32 vectors as they are."""


def make_model(
    *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_size: int = 16, rope: RopeConfig | None = None
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=heads * head_size,
        intermediate_size=16,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=32,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-6,
        rope=rope or RopeConfig(10_000.0),
        tied=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        bos_token_id=None,
    )


def make_qkv(model: ModelConfig, tokens: int, seed: int) -> Tensor:
    """Random inputs of the first op, [L, tokens, (Hq + 2·Hkv)·D].

    Queries drift slowly from token to token, so that selections overlap from step to step as real ones do.
    """
    generator = torch.Generator().manual_seed(seed)
    q, kv = model.num_heads * model.head_size, 2 * model.key_width
    steps = torch.randn(model.num_layers, tokens, q, generator=generator)
    drift = torch.nn.functional.avg_pool1d(steps.transpose(1, 2), 9, 1, 4, count_include_pad=False).transpose(1, 2)
    rest = torch.randn(model.num_layers, tokens, kv, generator=generator)
    return torch.cat((6 * drift, rest), dim=2)


def split_qkv(model: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [..., Hq, D], keys and values [..., Hkv, D]: views of ``qkv``, to write special values into."""
    heads = qkv.unflatten(-1, (-1, model.head_size))
    q, k, v = heads.split((model.num_heads, model.num_kv_heads, model.num_kv_heads), dim=-2)
    return q, k, v


@dataclass(frozen=True)
class Step:
    """What the ops of one pass returned: query and out [L, N, Hq·D], selection [L, B, Hkv, top_k]."""

    query: Tensor
    selection: Tensor
    out: Tensor

    def chosen(self, layer: int, row: int, head: int) -> list[int]:
        return [i for i in self.selection[layer, row, head].tolist() if i >= 0]


def run_ops(state: State, qkv: Tensor, positions: Sequence[int], slots: Sequence[int]) -> Step:
    """The three ops of every layer."""
    at, rows = torch.tensor(positions, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    results = []
    for layer in range(len(qkv)):
        q, selection = state.landmark_topk(layer, qkv[layer].clone(), at, rows)
        ticket = state.key_reconstruct(layer, selection, rows)
        results.append((q.clone(), selection, state.sparse_attention(layer, q, selection, ticket, rows)))
    return Step(*(torch.stack(column) for column in zip(*results, strict=True)))


def context(state: State, slot: int, qkv: Tensor, start: int = 0, is_last: bool = True) -> Step:
    """One stretch, qkv [L, N, width] its tokens."""
    n = qkv.shape[1]
    state.begin_pass("context", [slot], start, n, is_last)
    return run_ops(state, qkv, range(start, start + n), [slot])


def prompt(state: State, slot: int, qkv: Tensor, stretch: int | None = None) -> Step:
    """A whole prompt in stretches; the last stretch's results."""
    n = qkv.shape[1]
    stretch = stretch or n
    steps = [context(state, slot, qkv[:, i : i + stretch], i, i + stretch >= n) for i in range(0, n, stretch)]
    return steps[-1]


def generation(state: State, slots: Sequence[int], qkv: Tensor) -> Step:
    """One token a row, qkv [L, B, width]; rows that must be sealed first are."""
    for slot in slots:
        if slot != PADDING and state.must_seal(slot):
            state.seal_prompt(slot)
    state.begin_pass("generation", slots, 0, 1, False)
    state.step_prologue()
    return run_ops(state, qkv, [0 if s == PADDING else state.length(s) - 1 for s in slots], slots)


def whole_row(state: State, qkv: Tensor, prompt_tokens: int, slot: int = 0, **allocation: Any) -> list[Step]:
    """A prompt and everything after it, alone: the prompt's results, then those of each generated token."""
    total = qkv.shape[1]
    settings = {"top_k": state.config.top_k, "dense": False} | allocation
    state.allocate(slot, prompt_tokens=prompt_tokens, total_tokens=total, **settings)
    steps = [prompt(state, slot, qkv[:, :prompt_tokens])]
    return steps + [generation(state, [slot], qkv[:, i : i + 1]) for i in range(prompt_tokens, total)]


def margin(state: ReferenceState, slots: Sequence[int], step: Step) -> float:
    """How far the last chunk chosen and the first one not chosen were apart, at the closest.

    Two correct states may choose differently where this is about a rounding error.
    """
    closest = float("inf")
    for b, slot in enumerate(slots):
        row = None if slot == PADDING else state.rows[slot]
        if row is None or not row.layers:
            continue
        for layer, sealed in enumerate(row.layers):
            queries = step.query[layer, b].view(state.model.num_kv_heads, state.model.group, -1)
            for h, head_queries in enumerate(queries):
                excluded = torch.zeros(row.published, dtype=torch.bool)
                excluded[sealed.outliers[h]] = True
                scores = chunk_scores(head_queries, sealed.means[h, : row.published], excluded)
                best = scores[~excluded].sort(descending=True).values
                if len(best) > row.top_k:
                    closest = min(closest, float(best[row.top_k - 1] - best[row.top_k]))
    return closest
