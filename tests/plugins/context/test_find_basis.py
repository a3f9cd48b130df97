"""findBasis on the emulated GPU, against the eigenvectors."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.emulator import build as emulator

HERE = Path(__file__).parent
CONTEXT = emulator.ROOT / "plugins/kernels/context"


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    sources = [HERE / "find_basis_call.cpp", CONTEXT / "find_basis.cu", CONTEXT / "seal_scratch.cpp"]
    return ctypes.CDLL(str(emulator.build(sources, emulator.OUT / "find_basis.so", exports=True)))


def find_basis(library: ctypes.CDLL, grams: Tensor, heads: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of each layer B^T [W, rank] as it was stored, and before it was rounded."""
    layers, width, _ = grams.shape
    gram = grams.to(torch.float32).contiguous()
    basis = torch.empty(layers, width, rank, dtype=dtype)
    exact = torch.empty(layers, width, rank)
    error = library.callFindBasis(
        ctypes.c_void_p(gram.data_ptr()),
        *(heads, width // heads, rank, layers, int(dtype == torch.bfloat16)),
        ctypes.c_void_p(basis.data_ptr()),
        ctypes.c_void_p(exact.data_ptr()),
    )
    assert error == 0
    return basis, exact


def check(gram: Tensor, basis: Tensor, exact: Tensor) -> None:
    rank = exact.shape[1]
    wide = exact.double()
    assert (wide.T @ wide - torch.eye(rank)).abs().max() < 1e-6
    assert torch.equal(exact.to(basis.dtype), basis)
    values = torch.linalg.eigvalsh(gram.double())
    captured = torch.trace(wide.T @ gram.double() @ wide)
    assert captured >= values[-rank:].sum() - 1e-3 * values.sum() - 1e-30


def spectrum(width: int, values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    gram: Tensor = (turn * values) @ turn.T
    return gram


def inverse_powers(width: int, power: float) -> Tensor:
    return torch.arange(1, width + 1, dtype=torch.float64).pow(-power)


@pytest.mark.parametrize(
    ("heads", "head_size", "rank"),
    [(1, 64, 16), (1, 96, 32), (2, 64, 48), (2, 96, 80), (3, 64, 160), (1, 96, 96), (1, 128, 112)],
)
def test_spans_the_leading_eigenvectors(library: ctypes.CDLL, heads: int, head_size: int, rank: int) -> None:
    width = heads * head_size
    slow = spectrum(width, inverse_powers(width, 1.0))
    steep = spectrum(width, torch.exp(-torch.arange(width) / 8).double(), 1)
    grams = torch.stack([slow, steep])
    bases, exacts = find_basis(library, grams, heads, rank, torch.bfloat16 if heads == 1 else torch.float16)
    for gram, basis, exact in zip(grams, bases, exacts, strict=True):
        check(gram, basis, exact)


def test_is_orthonormal_where_the_keys_have_a_low_rank(library: ctypes.CDLL) -> None:
    width = 128
    row = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one_channel = torch.zeros(width, width, dtype=torch.float64)
    one_channel[5, 5] = 1.0
    zero = torch.zeros(width, width, dtype=torch.float64)
    grams = torch.stack([torch.outer(row, row), one_channel, zero, torch.eye(width, dtype=torch.float64) * 3])
    bases, exacts = find_basis(library, grams, 2, 64, torch.bfloat16)
    for gram, basis, exact in zip(grams, bases, exacts, strict=True):
        check(gram, basis, exact)


@pytest.mark.parametrize("scale", [1e-20, 1e20, 1e32])
def test_does_not_depend_on_the_scale(library: ctypes.CDLL, scale: float) -> None:
    gram = spectrum(96, inverse_powers(96, 1.5))
    basis, exact = find_basis(library, gram[None] * scale, 1, 32, torch.float16)
    check(gram, basis[0], exact[0])


def test_a_layer_of_nan_or_infinity_harms_no_other(library: ctypes.CDLL) -> None:
    gram = spectrum(96, inverse_powers(96, 1.5))
    wrong = [gram.clone() for _ in range(3)]
    wrong[0][3, 5] = torch.nan
    wrong[1][7, 7] = torch.inf
    wrong[2][2, 2] = -1e30
    alone, _ = find_basis(library, gram[None], 1, 48, torch.bfloat16)
    bases, _ = find_basis(library, torch.stack([wrong[0], gram, wrong[1], wrong[2], gram]), 1, 48, torch.bfloat16)
    assert torch.equal(bases[1], alone[0])
    assert torch.equal(bases[4], alone[0])
