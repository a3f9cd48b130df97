"""Synthetic queries that move from step to step as real ones do, for benches without a model.

What a chunk cache saves depends on how many of a step's chunks were selected shortly before. Against independent random
landmarks, elements ~ N(0, 1), fresh random queries would find next to nothing again, and fixed ones everything. Here a
query head is a sum of three Gaussian vectors: a theme that stays, a drift with a memory of about seven steps, and noise
of one step. The noise sets what the previous step lacks, the drift what leaves for some steps, the theme what comes
back. Heads and rows are independent and alike, so heads and steps differ less from each other than in real text.

Share of the selected chunks that an LRU of so many slots holds, 256 chunks selected for a group of 4 query heads:

    profile   chunks    256   512  1024  2048
    text      15,584   .562  .753  .860  .939    real text, 1.6 % selected: .557 .745 .861 .935
    text_61k   7,648   .560  .750  .861  .946    the same rates at 3.3 % selected
    hit60     15,584   .603  .796  .896  .960    real text, 3.1 % selected: .617 .814 .916 .964
    hit80     15,584   .802  .963  .991  .991

These are means of 6 seeds; a seed's 24 heads and 32 steps are within .01 of them. The rates depend on the share that is
selected (text at 256 of 7,648: .596 .793 .898 .964; at 125 of 7,648: as above) and on the group (1 query head: .618, 8:
.536), hardly on the head size, nor on bf16 or e4m3 landmarks. They hold from step 40 on (8 times k: from step 64).
Replaying from the first step again is a jump: about 20 steps of lower rates.

python -m trtllm_shadowkv.bench.drift --profile text --chunks 15584 --seed 0
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 0.86  # correlation of the drift with itself one step before
LOGIT_STD = 2.0  # of q·L / √D over the landmarks: the selected chunks hold a quarter of the softmax's mass
FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Profile:
    """Shares of a query's variance; the theme has the rest."""

    drift: float
    noise: float


PROFILES = {
    "text": Profile(drift=0.169, noise=0.053),
    "text_61k": Profile(drift=0.224, noise=0.061),
    "hit60": Profile(drift=0.138, noise=0.0425),
    "hit80": Profile(drift=0.0325, noise=0.01),
}


def queries(
    steps: int, rows: int, heads: int, head_size: int, *, profile: str, seed: int, device: torch.device | str
) -> Tensor:
    """Post-RoPE queries of consecutive decode steps.

    Undo the rotation (reference.rope.unrotate, at each step's position) before they enter a pass that applies RoPE.
    They are drawn on the CPU, so that every device gets the same ones; those of a row depend on neither ``rows`` nor
    ``steps``.

    Args:
        profile: a key of :data:`PROFILES`.

    Returns:
        [steps, rows, heads, head_size] float32 on ``device``; each head's vector has the norm LOGIT_STD·√head_size.

    Raises:
        KeyError: no such profile.
    """
    shares = PROFILES[profile]
    draws = torch.empty(1 + 2 * steps, rows, heads, head_size)
    for row in range(rows):
        generator = torch.Generator().manual_seed((seed << 20) + 1 + row)
        draws[:, row] = torch.randn(1 + 2 * steps, heads, head_size, generator=generator)
    theme, drift, noise = draws[:1], draws[1::2], draws[2::2]
    for t in range(1, steps):
        drift[t].mul_(math.sqrt(1 - MEMORY**2)).add_(drift[t - 1], alpha=MEMORY)
    mix = drift.mul_(math.sqrt(shares.drift)).add_(noise, alpha=math.sqrt(shares.noise))
    mix.add_(theme, alpha=math.sqrt(1 - shares.drift - shares.noise))
    mix *= LOGIT_STD * math.sqrt(head_size) / mix.norm(dim=-1, keepdim=True)
    return mix.to(device)


def landmarks(heads: int, chunks: int, head_size: int, seed: int) -> Tensor:
    """Independent N(0, 1) landmarks of ``heads`` KV heads: [heads, chunks, head_size] float32 on the CPU."""
    return torch.randn(heads, chunks, head_size, generator=torch.Generator().manual_seed(seed << 20))


def hit_rates(q: Tensor, keys: Tensor, top_k: int, warm_up: int, factors: Sequence[int] = FACTORS) -> Tensor:
    """Share of each step's selected chunks that an LRU of factor · top_k slots holds, selection as in the reference.

    Args:
        q: [steps, H, G, D] float32, the query heads of H KV heads; keys: [H, n, D] float32, their landmarks.
        warm_up: steps that fill the caches and are not counted.
        factors: at most n / top_k.

    Returns:
        [steps − warm_up, len(factors), H] float64.
    """
    heads, chunks, size = keys.shape
    # Time of last use, as one number: later steps, and in a step higher ids, are more recent. All LRUs are prefixes of
    # this order, whatever their size. Negative: never used.
    used = torch.arange(-chunks, 0).expand(heads, -1).contiguous()
    rates = []
    for t, step in enumerate(q):
        scores = torch.log_softmax(step @ keys.mT / math.sqrt(size), dim=2).amax(dim=1)
        chosen = scores.topk(top_k, dim=1).indices
        if t >= warm_up:
            last = used.gather(1, chosen)
            recent = used.topk(max(factors) * top_k, dim=1).values
            oldest = [recent[:, f * top_k - 1 : f * top_k].clamp(min=0) for f in factors]
            rates.append(torch.stack([(last >= o).double().mean(dim=1) for o in oldest]))
        used.scatter_(1, chosen, t * chunks + chosen)
    return torch.stack(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates of the synthetic queries.")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="text")
    parser.add_argument("--chunks", type=int, default=15_584)
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--group", type=int, default=4, help="query heads a KV head")
    parser.add_argument("--kv-heads", type=int, default=24, help="independent KV heads to average over")
    parser.add_argument("--warm-up", type=int, default=64, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=32, help="steps that are")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = (args.warm_up + args.steps, args.kv_heads, args.group, args.head_size)
    q = queries(*shape, profile=args.profile, seed=args.seed, device="cpu")
    keys = landmarks(args.kv_heads, args.chunks, args.head_size, args.seed)
    rates = hit_rates(q, keys, args.top_k, args.warm_up).mean(dim=(0, 2)).tolist()
    print(*(f"{factor}k {rate:.3f}" for factor, rate in zip(FACTORS, rates, strict=True)))


if __name__ == "__main__":
    main()
