"""Prompts read stretch by stretch on a rig, what they should have left behind, and seals against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.plugins.gpu.oracle import close, landmarks_of, outliers_of
from tests.plugins.gpu.rig import Rig
from trtllm_shadowkv.reference import rope
from trtllm_shadowkv.reference.landmarks import min_cosine
from trtllm_shadowkv.runtime.cuda_memory import outlier_words, plain_values, quantise, transposed_units


def normal_qkv(rig: Rig, tokens: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """[L, tokens, width] in the rig's type."""
    s = rig.shape
    size = (s.layers, tokens, (s.heads + 2 * s.kv_heads) * s.head_size)
    return (torch.randn(size, generator=generator, device=generator.device) * scale).to(rig.dtype)


def natural_qkv(rig: Rig, tokens: int, generator: torch.Generator) -> Tensor:
    """The same with keys as models have them: a mean, and a spectrum that decays."""
    s, qkv = rig.shape, normal_qkv(rig, tokens, generator)
    first, width = s.heads * s.head_size, s.kv_heads * s.head_size
    keys = qkv[:, :, first : first + width]
    mixed = torch.linalg.qr(torch.randn(width, width, generator=generator, device=generator.device)).Q
    decay = torch.arange(1, width + 1, device=keys.device) ** -0.7 * width**0.5 / 2
    mean = torch.randn(width, generator=generator, device=generator.device)
    keys.copy_((keys.float() * decay) @ mixed + mean)
    return qkv


def split(rig: Rig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [L, S, Hq, D], k and v [L, S, H, D] float32, pre-RoPE."""
    s = rig.shape
    heads = qkv.float().unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_size))
    q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), dim=2)
    return q, k, v


def rotated(rig: Rig, x: Tensor, start: int = 0) -> Tensor:
    """[S, heads, D] at positions from ``start``."""
    frequencies = torch.tensor(
        rig.model.rope.inverse_frequencies(rig.shape.head_size), dtype=torch.float32, device=x.device
    )
    return rope.rotate(x, torch.arange(start, start + len(x), device=x.device), frequencies)


def read_prompt(rig: Rig, slot: int, qkv: Tensor, stretches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Reads stretches of a row's prompt from where it is; q and out [L, tokens, Hq·D], poisoned before."""
    s, state, stream = rig.shape, rig.state, rig.stream.cuda_stream
    outputs = []
    at = 0
    for length in stretches:
        start = state.length(slot)
        x = qkv[:, at : at + length].contiguous()
        positions = torch.arange(start, start + length, dtype=torch.int32, device=x.device)
        q = torch.full((s.layers, length, s.heads * s.head_size), torch.nan, dtype=rig.dtype, device=x.device)
        out = torch.full_like(q, torch.nan)
        rig.synchronize()
        last = start + length == state.row(slot).prompt_tokens
        state.begin_pass("context", [slot], start, length, last, stream=stream)
        for i in range(s.layers):
            state.landmark_topk(i, x[i].data_ptr(), positions.data_ptr(), length, q[i].data_ptr(), None, stream)
            state.key_reconstruct(i, length, stream)
            state.sparse_attention(i, q[i].data_ptr(), length, out[i].data_ptr(), stream)
        rig.synchronize()
        assert state.fault(stream) == 0
        outputs.append((q, out))
        at += length
    return torch.cat([q for q, _ in outputs], 1), torch.cat([out for _, out in outputs], 1)


def check_prompt(rig: Rig, slot: int, qkv: Tensor, q: Tensor, out: Tensor, tolerance: float = 6e-3) -> None:
    """Live pages, q and exact causal attention of a whole prompt that is not sealed yet."""
    s, group = rig.shape, rig.shape.heads // rig.shape.kv_heads
    raw_q, raw_k, raw_v = split(rig, qkv)
    tokens = qkv.shape[1]
    for layer in range(s.layers):
        keys, values = rig.read_live(slot, layer, 0, tokens)  # [H, S, D]
        close(q[layer].float().unflatten(1, (s.heads, -1)), rotated(rig, raw_q[layer]), 4e-3)
        close(keys.transpose(0, 1), rotated(rig, raw_k[layer]), 4e-3)
        assert torch.equal(values.transpose(0, 1), raw_v[layer])
        queries = q[layer].double().unflatten(1, (s.heads, -1)).transpose(0, 1)
        scores = queries @ keys.double().repeat_interleave(group, 0).transpose(1, 2) / s.head_size**0.5
        scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        expected = scores.softmax(-1) @ values.double().repeat_interleave(group, 0)
        close(out[layer].unflatten(1, (s.heads, -1)).transpose(0, 1), expected, tolerance)


def seal(rig: Rig, slot: int) -> tuple[Tensor, Tensor]:
    """Seals a row; its keys and values [L, H, S, D] float32 as they were in live pages before."""
    length = rig.state.length(slot)
    before = [rig.read_live(slot, layer, 0, length) for layer in range(rig.shape.layers)]
    rig.state.seal_prompt(slot, rig.stream.cuda_stream)
    rig.synchronize()
    return torch.stack([k for k, _ in before]), torch.stack([v for _, v in before])


def basis_of(rig: Rig, layer: int, slot: int) -> Tensor:
    """B [r, H·D] float64 as it is stored."""
    return rig.memory.factor_b[layer, rig.state.sealed_row_of(slot)].double().T


def pre_rope(rig: Rig, keys: Tensor, tokens: int) -> Tensor:
    """[H, S, D] post-RoPE -> [tokens, H·D] float64, un-rotated in float32."""
    frequencies = torch.tensor(
        rig.model.rope.inverse_frequencies(rig.shape.head_size), dtype=torch.float32, device=keys.device
    )
    positions = torch.arange(tokens, device=keys.device)
    return rope.unrotate(keys[:, :tokens].transpose(0, 1), positions, frequencies).flatten(1).double()


def check_factors(rig: Rig, layer: int, slot: int, keys: Tensor, tokens: int, loss: float = 1e-3) -> None:
    """B is orthonormal and captures, up to ``loss`` of all energy, as much as any basis; A = K·Bᵀ."""
    wide = pre_rope(rig, keys, tokens)
    wide = wide / wide.abs().max().clamp(min=1e-300)
    b = basis_of(rig, layer, slot)
    identity = torch.eye(len(b), dtype=torch.float64, device=b.device)
    rounding = 2.0**-8 if rig.dtype == torch.bfloat16 else 2.0**-11
    assert float((b @ b.T - identity).abs().max()) < 4 * rounding
    gram = wide.T @ wide
    best = torch.linalg.eigvalsh(gram.cpu())[-len(b) :].sum()  # on a GPU it reads what initcheck says nobody wrote
    exact = torch.linalg.qr(b.T).Q  # B spans what it spans, rounded or not
    captured = (exact.T @ gram @ exact).trace()
    assert captured >= best - loss * gram.trace(), f"captures {captured / gram.trace()}, best {best / gram.trace()}"
    page, place = rig.sealed_at(slot, torch.arange(tokens // rig.shape.chunk, device=b.device))
    a = rig.memory.factor_a[layer].unflatten(1, (-1, rig.shape.chunk))[page, place].double().flatten(0, 1)
    close(a, pre_rope(rig, keys, tokens) @ b.T, 4 * rounding)


def check_landmarks(rig: Rig, layer: int, slot: int, keys: Tensor, chunks: int) -> None:
    """Landmarks are the means of the chunks' keys, in their format."""
    means = keys[:, : chunks * rig.shape.chunk].unflatten(1, (chunks, -1)).mean(2)
    found = landmarks_of(rig, layer, slot, chunks)
    if rig.memory.centres is None:
        close(found, means, 4e-3)
        return
    centre = rig.memory.centres[layer, rig.state.sealed_row_of(slot)]
    close(centre, means.mean(1), 1e-4)
    small, scale = quantise(means - centre[:, None], (2,))
    close(found, small.float() * scale, 2e-2)  # roundings may differ by one step where the mean does in its last bit


def check_outliers(rig: Rig, layer: int, slot: int, keys: Tensor, values: Tensor, chunks: int) -> None:
    """Chunk 0 and those of the least cosine, up to rounding; exact keys and values; the bit map."""
    s, o, row = rig.shape, outliers_of(rig, slot), rig.state.sealed_row_of(slot)
    ids = rig.memory.outlier_ids[layer, row, :, :o].long()
    assert bool((ids[:, 0] == 0).all()) and bool((ids.diff(dim=1) > 0).all()) and bool((ids < chunks).all())
    k, v = (x[:, : chunks * s.chunk].unflatten(1, (chunks, s.chunk)) for x in (keys, values))
    cosine = min_cosine(k, k.mean(2))
    cosine[:, 0] = -2
    chosen = torch.zeros_like(cosine, dtype=torch.bool).scatter_(1, ids, True)
    if o < chunks:
        worst = torch.where(chosen, cosine, -2.0).amax(1)
        best = torch.where(chosen, 2.0, cosine).amin(1)
        assert bool((worst <= best + 1e-4).all())
    pick = ids[:, :, None, None].expand(-1, -1, s.chunk, s.head_size)
    found = rig.memory.outlier_keys[layer, row, :, :o].float()
    assert torch.equal(found, k.gather(1, pick))
    units = rig.memory.outlier_values[layer, row, :, : o * s.chunk // 8].float()
    assert torch.equal(plain_values(units).unflatten(1, (o, s.chunk)), v.gather(1, pick))
    words = outlier_words(ids, chunks)
    page, place = rig.sealed_at(slot, torch.arange(words.shape[1], device=ids.device) * 32)
    assert torch.equal(rig.memory.excluded[layer][page, :, place // 32].T, words)


def check_values(rig: Rig, layer: int, slot: int, values: Tensor, chunks: int) -> None:
    """The value region holds the chunks' values in their format, byte for byte."""
    s = rig.shape
    units = transposed_units(values[:, : chunks * s.chunk].unflatten(1, (chunks, s.chunk)))
    stored = rig.values[slot][layer, :, :chunks]
    if rig.memory.value_scales is None:
        assert torch.equal(stored.float().to(units.device), units)
        return
    small, scale = quantise(units, (2, 3, 4))
    page, place = rig.sealed_at(slot, torch.arange(chunks, device=units.device))
    found = rig.memory.value_scales[layer][page, :, place].T
    assert torch.allclose(found, scale.flatten(1), rtol=1e-6, atol=0)
    close(stored.float().to(units.device) * found[:, :, None, None, None], small.float() * scale[..., :], 1e-3)


def check_seal(rig: Rig, slot: int, keys: Tensor, values: Tensor, loss: float = 1e-3) -> None:
    """Everything that sealing a row of these live keys and values [L, H, S, D] leaves behind."""
    chunks = rig.state.row(slot).published
    assert rig.state.row(slot).sealed and chunks > 0
    for layer in range(rig.shape.layers):
        check_landmarks(rig, layer, slot, keys[layer], chunks)
        check_outliers(rig, layer, slot, keys[layer], values[layer], chunks)
        check_values(rig, layer, slot, values[layer], chunks)
        check_factors(rig, layer, slot, keys[layer], chunks * rig.shape.chunk, loss)
