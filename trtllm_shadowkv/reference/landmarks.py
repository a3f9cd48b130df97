"""Landmarks and outlier chunks (Algorithm 1: ``Reduce``, ``CosineSimilarity``, ``ArgTopK(-Min(S), o)``)."""

from __future__ import annotations

import torch
from torch import Tensor


def landmarks(keys: Tensor) -> Tensor:
    """Mean of every chunk's post-RoPE keys.

    Args:
        keys: [Hkv, n, C, D] float32, post-RoPE.

    Returns:
        [Hkv, n, D].
    """
    return keys.mean(dim=2)


def min_cosine(keys: Tensor, means: Tensor) -> Tensor:
    """Smallest cosine between a chunk's landmark and its keys.

    A pair with a zero or non-finite vector counts as the worst possible, −1: such a chunk's landmark says nothing
    about its keys.

    Args:
        keys: [Hkv, n, C, D]; means: [Hkv, n, D].

    Returns:
        [Hkv, n] in [−1, 1].
    """
    wide, means = keys.to(torch.float64), means.to(torch.float64)  # squares of huge float32 keys overflow in float32
    dots = torch.einsum("hncd,hnd->hnc", wide, means)
    norms = wide.norm(dim=-1) * means.norm(dim=-1, keepdim=True)
    cosine = torch.where(norms > 0, dots / norms, -1.0)
    return torch.nan_to_num(cosine, nan=-1.0).clamp(-1, 1).amin(dim=2).to(torch.float32)


def outlier_chunks(keys: Tensor, count: int) -> Tensor:
    """Chunks that a landmark represents worst: chunk 0 and the count − 1 others of lowest :func:`min_cosine`.

    Chunk 0 holds the attention sink. Ties take the lower id.

    Args:
        keys: [Hkv, n, C, D] float32, post-RoPE.
        count: o; where there are fewer chunks, all of them.

    Returns:
        [Hkv, min(o, n)] int64, ascending.
    """
    worst = min_cosine(keys, landmarks(keys))
    worst[:, 0] = -2.0  # below any cosine
    order = torch.sort(worst, dim=1, stable=True).indices
    return order[:, : min(count, keys.shape[1])].sort(dim=1).values
