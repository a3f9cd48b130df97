"""What a step should have done, computed by the reference's functions from what lies in the state's own memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.plugins.gpu.device import DEVICE
from tests.plugins.gpu.rig import Rig
from trtllm_shadowkv.reference import rope
from trtllm_shadowkv.reference.attention import merge, partial_attention
from trtllm_shadowkv.reference.factors import rebuild
from trtllm_shadowkv.reference.selection import chunk_scores, top_chunks
from trtllm_shadowkv.runtime.cuda_memory import plain_values


def landmarks_of(rig: Rig, layer: int, slot: int, chunks: int) -> Tensor:
    """[H, n, D] float32 as the GPU holds them (e4m3: without the centre, which ranks nothing)."""
    page, place = rig.sealed_at(slot, torch.arange(chunks, device=DEVICE))
    if rig.shape.landmarks == "element":
        return rig.memory.landmarks[layer][page, :, place].float().transpose(0, 1)
    assert rig.memory.landmark_scales is not None
    raw = rig.memory.landmarks[layer].view(torch.uint8)[page, :, place].view(torch.float8_e4m3fn).float()
    return (raw * rig.memory.landmark_scales[layer][page, :, place][..., None]).transpose(0, 1)


def outliers_of(rig: Rig, slot: int) -> int:
    """Outlier chunks of each head."""
    return min(rig.shape.outliers, rig.state.row(slot).prompt_chunks)


def excluded_of(rig: Rig, layer: int, slot: int, chunks: int) -> Tensor:
    """[H, n] bool: outliers."""
    row = rig.state.sealed_row_of(slot)
    out = torch.zeros(rig.shape.kv_heads, chunks, dtype=torch.bool, device=DEVICE)
    return out.scatter_(1, rig.memory.outlier_ids[layer, row, :, : outliers_of(rig, slot)].long(), True)


def group(rig: Rig, q: Tensor, head: int) -> Tensor:
    """Query heads [G, D] of a KV head from q [Hq·D]."""
    size = rig.shape.heads // rig.shape.kv_heads
    return q.float().unflatten(0, (rig.shape.heads, -1))[head * size : (head + 1) * size]


def check_selection(rig: Rig, layer: int, slot: int, q: Tensor, selection: Tensor, *, exact: bool = False) -> None:
    """``selection`` [H, top_k] holds the best chunks by the reference's scores, up to their rounding.

    Args:
        exact: scores are exactly representable, so that nothing but the reference's own choice will do.
    """
    row = rig.state.row(slot)
    n = row.published
    means, excluded = landmarks_of(rig, layer, slot, n), excluded_of(rig, layer, slot, n)
    for h in range(rig.shape.kv_heads):
        scores = chunk_scores(group(rig, q, h), means[h], excluded[h])
        chosen = selection[h][selection[h] >= 0].long()
        expected = min(row.top_k, int((~excluded[h]).sum()))
        assert len(chosen) == expected, f"head {h}: {len(chosen)} chunks, expected {expected}"
        assert bool((selection[h][expected:] == -1).all())
        assert bool((chosen.diff() > 0).all()), "not ascending"
        assert bool((chosen < n).all()) and not bool(excluded[h][chosen].any())
        if expected == 0:
            continue
        rest = ~excluded[h]
        rest[chosen] = False
        if exact:
            assert torch.equal(chosen, top_chunks(scores, excluded[h], row.top_k))
        elif bool(rest.any()):
            worst, best = scores[chosen].min(), scores[rest].max()
            finite = torch.isfinite(worst) and torch.isfinite(best)
            slack = 2e-3 * (1 + worst.abs() + scores[torch.isfinite(scores)].abs().max()) if finite else 0.0
            assert worst >= best - slack, f"head {h}: kept {worst}, left {best}"


def slots_of(rig: Rig, layer: int, slot: int, head: int, chunks: Tensor) -> Tensor:
    """Cache slots of chunks that must be there."""
    order = rig.memory.cache_order[layer, rig.state.sealed_row_of(slot), head]
    held = order[:, 0][:, None] == chunks[None, :]
    assert bool((held.sum(0) == 1).all()), "a selected chunk is not in the cache exactly once"
    assert torch.equal(order[:, 1].sort().values, torch.arange(len(order), device=DEVICE, dtype=torch.int32))
    return order[held.int().argmax(0), 1].long()


def cached(rig: Rig, layer: int, slot: int, head: int, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [m·C, D] float32 of chunks in the cache."""
    row, at = rig.state.sealed_row_of(slot), slots_of(rig, layer, slot, head, chunks)
    keys = rig.memory.cache_keys[layer, row, head][at].float().flatten(0, 1)
    values = rig.memory.cache_values[layer, row, head].view(torch.uint8)[at].view(rig.value_dtype).float()
    if rig.memory.value_scales is not None:
        page, place = rig.sealed_at(slot, chunks)
        values = values * rig.memory.value_scales[layer][page, head, place][:, None, None, None]
    return keys, plain_values(values.flatten(0, 1))


def check_cache(rig: Rig, layer: int, slot: int, selection: Tensor) -> None:
    """Every selected chunk's values are the value pool's bytes and its keys A·B with RoPE."""
    row, c, d = rig.state.sealed_row_of(slot), rig.shape.chunk, rig.shape.head_size
    frequencies = torch.tensor(rig.model.rope.inverse_frequencies(d), dtype=torch.float32, device=DEVICE)
    for h in range(rig.shape.kv_heads):
        chunks = selection[h][selection[h] >= 0].long()
        if not len(chunks):
            continue
        at = slots_of(rig, layer, slot, h, chunks)
        got = rig.memory.cache_values.view(torch.uint8)[layer, row, h][at].cpu()
        assert torch.equal(got, rig.values[slot].view(torch.uint8)[layer, h][chunks.cpu()]), "values differ"
        page, place = rig.sealed_at(slot, chunks)
        a = rig.memory.factor_a[layer].unflatten(1, (-1, c))[page, place].float().flatten(0, 1)
        keys = rebuild(a, rig.memory.factor_b[layer, row].T.float(), h, d)
        positions = (chunks[:, None] * c + torch.arange(c, device=DEVICE)).flatten()
        keys = rope.rotate(keys, positions, frequencies)
        found = rig.memory.cache_keys[layer, row, h][at].float().flatten(0, 1)
        close(found, keys, 8e-3)


def expected_attention(rig: Rig, layer: int, slot: int, q: Tensor, selection: Tensor) -> Tensor:
    """[Hq, D]: outliers, window and selected chunks, from what the state holds, in float64."""
    row, s = rig.state.row(slot), rig.shape
    live_keys, live_values = rig.read_live(slot, layer, row.published * s.chunk, row.length)
    out = []
    for h in range(s.kv_heads):
        parts = [(live_keys[h], live_values[h])]
        if row.sealed:
            sealed, o = rig.state.sealed_row_of(slot), outliers_of(rig, slot)
            values = rig.memory.outlier_values[layer, sealed, h, : o * s.chunk // 8].float()
            keys = rig.memory.outlier_keys[layer, sealed, h, :o].float().flatten(0, 1)
            parts.append((keys, plain_values(values)))
            chunks = selection[h][selection[h] >= 0].long()
            if len(chunks):
                parts.append(cached(rig, layer, slot, h, chunks))
        queries = group(rig, q, h).double()
        out.append(merge([partial_attention(queries, k.double(), v.double()) for k, v in parts]))
    return torch.cat(out)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative error of the whole, ‖found − expected‖ / ‖expected‖; NaN fails."""
    found, expected = found.double(), expected.double().to(found.device)
    error = (found - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}, at most {tolerance:.0e}"


def check_step(
    rig: Rig, slots: list[int], q: Tensor, selection: Tensor, out: Tensor, *, tolerance: float = 6e-3
) -> None:
    """Selection, cache and attention of every row and layer of a step."""
    for layer in range(rig.shape.layers):
        for b, slot in enumerate(slots):
            if slot < 0:
                assert not bool(q[layer, b].any()) and not bool(out[layer, b].any())
                assert bool((selection[layer, b] == -1).all())
                continue
            if rig.state.row(slot).sealed:
                check_selection(rig, layer, slot, q[layer, b], selection[layer, b])
                check_cache(rig, layer, slot, selection[layer, b])
            else:
                assert bool((selection[layer, b] == -1).all())
            expected = expected_attention(rig, layer, slot, q[layer, b], selection[layer, b])
            found = out[layer, b].double().unflatten(0, (rig.shape.heads, -1))
            errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
            assert bool((errors <= tolerance).all()), f"layer {layer} row {b} slot {slot}: {errors.tolist()}"
