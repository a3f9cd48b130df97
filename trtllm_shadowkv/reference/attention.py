"""Attention over parts of a context, merged by log-sum-exp (arXiv 2205.14135, section 3.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def partial_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ/√D)·V over one part, and the log-sum-exp of its scores.

    Args:
        queries: [N, D]; keys, values: [T, D], float32, of one head.
        mask: [N, T] bool, true where a query may look; None: everywhere.

    Returns:
        out [N, D] and lse [N]; an empty part gives zeros and −∞.
    """
    scores = queries @ keys.T / math.sqrt(queries.shape[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=1) if scores.shape[1] else torch.full((len(queries),), -math.inf)
    weights = torch.where(torch.isneginf(lse)[:, None], 0.0, torch.exp(scores - lse[:, None]))
    return weights @ values, lse


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over the union of disjoint parts, from each part's (out [N, D], lse [N])."""
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, dim=0)
    return sum((out * torch.exp(lse - total)[:, None] for out, lse in parts), torch.zeros_like(parts[0][0]))


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the newest N tokens over all T tokens up to their own position.

    Args:
        queries: [N, Hq, D], positions T − N … T − 1; keys, values: [T, Hkv, D].

    Returns:
        [N, Hq, D].
    """
    n, heads, _ = queries.shape
    total, kv_heads, _ = keys.shape
    mask = torch.arange(total)[None, :] <= torch.arange(total - n, total)[:, None]
    group = heads // kv_heads
    out = [partial_attention(queries[:, h], keys[:, h // group], values[:, h // group], mask)[0] for h in range(heads)]
    return torch.stack(out, dim=1)
