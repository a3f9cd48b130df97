"""Low-rank factors of the pre-RoPE keys (Algorithm 1, ``A, B = SVD(K)``)."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_shadowkv.errors import StateError


def factorise(keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r approximation K ≈ A·B in the Frobenius norm, B with orthonormal rows (Eckart–Young).

    The rows of B are the eigenvectors of the Gram matrix KᵀK with the largest eigenvalues (the right singular
    vectors of K) and A = K·Bᵀ. Where K has a lower rank than r the eigenvectors of eigenvalue zero complete B, so it
    always has r orthonormal rows. The Gram matrix and its decomposition are in float64: float32 would lose singular
    values below 3e-4 of the largest.

    Args:
        keys: [n, W] float32, pre-RoPE keys of n tokens, KV heads concatenated (W = num_kv_heads · head_size).
        rank: r, 1 ≤ r ≤ W.

    Returns:
        A: [n, r] float32; B: [r, W] float32.

    Raises:
        StateError: a key is not finite.
    """
    if not torch.isfinite(keys).all():
        raise StateError("the keys to factorise hold NaN or infinity", "finite keys")
    wide = keys.to(torch.float64)
    _, vectors = torch.linalg.eigh(wide.T @ wide)  # ascending eigenvalues
    basis = vectors[:, -rank:].flip(1).T.contiguous().to(torch.float32)
    return keys @ basis.T, basis


def project(keys: Tensor, basis: Tensor) -> tuple[Tensor, float, float]:
    """Coordinates of new keys in a prompt's basis (the paper's ShadowKV+), and what the projection loses.

    Args:
        keys: [n, W] float32, pre-RoPE.
        basis: B, [r, W] float32 with orthonormal rows.

    Returns:
        A rows [n, r]; ‖K − A·B‖² and ‖K‖² (their ratio is the relative residual).
    """
    coordinates = keys @ basis.T
    lost = (keys - coordinates @ basis).square().sum()
    return coordinates, float(lost), float(keys.square().sum())


def rebuild(coordinates: Tensor, basis: Tensor, head: int, head_size: int) -> Tensor:
    """Pre-RoPE keys of one KV head, A·B restricted to the head's columns (Algorithm 2, ``MatMul(Gather(A, I), B)``).

    Args:
        coordinates: [n, r] rows of A.
        basis: [r, W].

    Returns:
        [n, head_size].
    """
    return coordinates @ basis[:, head * head_size : (head + 1) * head_size]
