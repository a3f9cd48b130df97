"""What a scheduler and an executor may expect of a state: the owner of every sequence's keys and values.

Rows are addressed by slot. The calls of one step come in this order::

    begin_pass(kind, …)      host data that the ops of this pass read
    step_prologue()          generation only: advance every row, publish what was sealed, choose what to seal
    the three ops            layer by layer, called by the graph
    seal_prompt(slot)        between passes, where must_seal(slot)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.models import ModelConfig

PassKind = Literal["context", "generation"]
PADDING = -1
"""Slot of a padding row: it computes nothing and its outputs are zeros."""


@dataclass
class RowStatistics:
    """Counters of one row, over all layers and KV heads.

    Attributes:
        hits, misses: selected chunks that were, or were not, in the chunk cache.
        bytes_fetched: bytes of values copied from the value pool into the chunk cache.
        sealed_tokens: tokens in sealed chunks, prompt and generated.
        generated_sealed: those of them that were sealed one chunk at a time, by projection.
        residual_lost, residual_total: ‖K − A·B‖² and ‖K‖² of those chunks' keys.
    """

    hits: int = 0
    misses: int = 0
    bytes_fetched: int = 0
    sealed_tokens: int = 0
    generated_sealed: int = 0
    residual_lost: float = 0.0
    residual_total: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else None

    @property
    def residual(self) -> float | None:
        """Relative error of the projected keys, ‖K − A·B‖/‖K‖; None before a chunk was sealed by projection."""
        return (self.residual_lost / self.residual_total) ** 0.5 if self.residual_total else None


@dataclass(frozen=True)
class Footprint:
    """Bytes one sequence needs.

    Attributes:
        live: keys and values of all its tokens before it is sealed (or for good, where it never is).
        sealed: its sealed state; 0 where it is never sealed. Both exist at once while it is being sealed.
        host: its values in the value pool.
        kept: what stays of ``live`` when it is sealed.
    """

    live: int = 0
    sealed: int = 0
    host: int = 0
    kept: int = 0

    def once_sealed(self) -> Footprint:
        return replace(self, live=self.kept)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.live + other.live, self.sealed + other.sealed, self.host + other.host)

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(self.live - other.live, self.sealed - other.sealed, self.host - other.host)


class PassRow(Protocol):
    """What the checks below read of a row."""

    length: int
    prompt_done: bool


def check_allocation(rows: Mapping[int, PassRow], slot: int, top_k: int, config: ShadowKVConfig) -> None:
    """Raise :class:`StateError` unless ``slot`` is free and ``top_k`` is within what is configured."""
    if slot in rows or slot < 0:
        raise StateError(f"slot {slot} is {'in use' if slot in rows else 'negative'}", "a free slot")
    if not 1 <= top_k <= config.top_k:
        raise StateError(f"top_k is {top_k}", f"from 1 to {config.top_k}, as configured")


def check_pass(
    rows: Mapping[int, PassRow],
    must_seal: Callable[[int], bool],
    kind: PassKind,
    slots: Sequence[int],
    start: int,
    length: int,
) -> None:
    """Raise :class:`StateError` unless the arguments of ``State.begin_pass`` fit the rows as they stand."""
    live = [s for s in slots if s != PADDING]
    if len(set(live)) != len(live) or any(s not in rows for s in live):
        raise StateError(f"pass over slots {list(slots)}", "allocated slots, each once")
    if kind == "context":
        if len(slots) != 1 or not live:
            raise StateError(f"a context pass over slots {list(slots)}", "one allocated slot")
        row = rows[live[0]]
        if row.prompt_done or start != row.length or length < 1:
            raise StateError(f"{length} tokens from {start}, but the row holds {row.length}", "the next stretch")
    elif any(not rows[s].prompt_done or must_seal(s) for s in live):
        raise StateError("a generation pass over a row whose prompt is not done or that must be sealed first")


class Rows(Protocol):
    """What a scheduler needs of a state."""

    model: ModelConfig
    config: ShadowKVConfig

    def allocate(self, slot: int, *, prompt_tokens: int, total_tokens: int, top_k: int, dense: bool) -> None:
        """Give a slot to a sequence of ``prompt_tokens`` that may grow to ``total_tokens``.

        Args:
            top_k: chunks to select a KV head, at most the configured number.
            dense: exact attention whatever its length.
        """

    def release(self, slot: int) -> None:
        """Take back everything a slot holds; nothing to do where it holds nothing."""

    def length(self, slot: int) -> int:
        """Tokens stored for this row."""

    def is_sealed(self, slot: int) -> bool: ...

    def must_seal(self, slot: int) -> bool:
        """True where the next token would take a row that is not sealed over its dense limit."""

    def seal_prompt(self, slot: int) -> None:
        """Seal every chunk that is outside the window at the row's next token, and release its live pages."""

    def statistics(self, slot: int) -> RowStatistics: ...


class State(Rows, Protocol):
    """With what the ops of a graph call; ``reference.state.ReferenceState`` is its oracle."""

    def begin_pass(self, kind: PassKind, slots: Sequence[int], start: int, length: int, is_last: bool) -> None:
        """Announce a pass.

        Args:
            kind: ``context``: one sequence, ``length`` tokens of its prompt from position ``start``;
                ``generation``: one token a row.
            slots: a slot for each row; −1 is a padding row (generation only).
            start, length, is_last: the stretch, and whether it ends the prompt (context only).
        """

    def step_prologue(self) -> None: ...

    def landmark_topk(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]: ...

    def key_reconstruct(self, layer: int, selection: Tensor, slots: Tensor) -> Tensor: ...

    def sparse_attention(self, layer: int, q: Tensor, selection: Tensor, ticket: Tensor, slots: Tensor) -> Tensor: ...
