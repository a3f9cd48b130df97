"""Rotary position embedding: its settings and its table of inverse frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal, get_args

from trtllm_shadowkv.errors import ConfigError
from trtllm_shadowkv.json_reader import JsonReader

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head (rotate-half pairing).

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: ``default``; ``linear``: positions divided by ``factor``; ``llama3``: long wavelengths only
            (transformers' ``modeling_rope_utils.py``).
        factor: context extension; 1.0 for ``default``.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: ``llama3`` only. Wavelengths above
            original / low are divided by ``factor``, those below original / high are kept, those between blended.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_size: int) -> list[float]:
        """Radians a position for each of the head_size / 2 pairs, in double precision.

        Pair j turns by theta^(-2j / head_size), scaled as ``kind`` says.
        """
        plain = [self.theta ** (-2 * j / head_size) for j in range(head_size // 2)]
        if self.kind != "llama3":
            return [f / self.factor for f in plain]
        return [f * (kept + (1 - kept) / self.factor) for f, kept in ((f, self._kept_share(f)) for f in plain)]

    def _kept_share(self, frequency: float) -> float:
        """How much of a ``llama3`` frequency stays undivided, 0 to 1; linear in turns over the original context."""
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return min(1.0, max(0.0, share))


_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rope_from_section(section: Any, model: JsonReader, theta_key: str, context: int) -> RopeConfig:
    """One rope_parameters / rope_scaling / rotary_scaling section; ``theta_key`` is read where it has no theta.

    ``context`` is the original context of a ``llama3`` section that does not state it.

    Raises:
        ConfigError: another kind, an unknown or missing key, a bad value.
    """
    if section is None:
        section = {}
    r = JsonReader(section, f"{model.where}: the RoPE section")
    kinds = [section[k] for k in ("rope_type", "type") if k in section] or ["default"]
    kind = kinds[0]
    if kind not in get_args(RopeKind) or kind != kinds[-1]:
        raise ConfigError(
            f"{r.where} asks for {' and '.join(map(short, kinds))}",
            f"one of {', '.join(get_args(RopeKind))}",
            "other RoPE kinds are not supported",
        )
    if unknown := sorted(str(k) for k in section if k not in _ROPE_KEYS):
        raise ConfigError(f"{r.where} has the key {unknown[0]!r}", f"only keys among {', '.join(sorted(_ROPE_KEYS))}")
    r.exactly("partial_rotary_factor", 1, "rotating a part of the head")
    theta = r.positive("rope_theta", model.positive(theta_key, 10_000.0))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", r.positive("factor"))
    low, high = r.positive("low_freq_factor"), r.positive("high_freq_factor")
    if high <= low:
        raise r.error("high_freq_factor", f"more than low_freq_factor ({low})")
    original = r.integer("original_max_position_embeddings", context)
    return RopeConfig(theta, "llama3", r.positive("factor"), low, high, original)
