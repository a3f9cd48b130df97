"""Choice of chunks by their landmarks (Algorithm 2, first half)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chunk_scores(queries: Tensor, means: Tensor, excluded: Tensor) -> Tensor:
    """Score of every chunk for one KV head: the largest, over its query heads, of log softmax(q·L / √D).

    Algorithm 2 takes the softmax over the chunks for each query head, then the maximum over the heads of a group.
    The logarithm changes no ranking and keeps the order of chunks whose probability underflows. Excluded chunks
    (outliers, which are attended anyway) leave before the softmax. A NaN score counts as −∞.

    Args:
        queries: [G, D] float32, post-RoPE, the query heads of this KV head.
        means: [n, D] float32.
        excluded: [n] bool.

    Returns:
        [n] float32; −∞ where excluded.
    """
    # In float64 and rounded once: a float32 product may give equal landmarks unequal scores, by their place in a tile.
    logits = (queries.to(torch.float64) @ means.to(torch.float64).T / math.sqrt(queries.shape[1])).to(torch.float32)
    logits = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    logits = logits.masked_fill(excluded, -math.inf)
    # A head whose scores are all −∞, or that has +∞ among them, has no softmax: NaN, which counts as −∞.
    scores = torch.log_softmax(logits, dim=1).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return scores.amax(dim=0)


def top_chunks(scores: Tensor, excluded: Tensor, top_k: int) -> Tensor:
    """The top_k best chunks that are not excluded, in ascending order of id; ties take the lower id.

    Args:
        scores: [n] float32.
        excluded: [n] bool.

    Returns:
        [min(top_k, selectable)] int64.
    """
    ids = (~excluded).nonzero().flatten()
    order = torch.sort(scores[ids], descending=True, stable=True).indices
    return ids[order[:top_k]].sort().values
