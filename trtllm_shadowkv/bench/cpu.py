"""The CPU executor against transformers, same model, float32, interleaved.

python -m trtllm_shadowkv.bench.cpu demo/model demo/engine --tokens 5000 --output docs/results/cpu-smollm2.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtllm_shadowkv.bench.report import report, write
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor, usable_cores
from trtllm_shadowkv.runtime.scheduler import stretches
from trtllm_shadowkv.runtime.value_pool import ValuePool

STRETCH = 1024
DENSE, SEALED = 0, 1


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class Contest:
    """Both systems with the same prompt.

    Args:
        model_dir, engine_dir: a Hugging Face directory and the engine built from it, with ShadowKV.
        ids: the prompt, longer than the engine's dense limit.
        steps: tokens that may be decoded.
    """

    def __init__(self, model_dir: Path, engine_dir: Path, ids: list[int], steps: int) -> None:
        from transformers import AutoModelForCausalLM

        self.ids, self.total = ids, len(ids) + steps
        engine = EngineDirectory.open(engine_dir)
        self.state = CpuState(engine.model, engine.build.shadowkv, ValuePool(1 << 40))
        self.executor = OnnxCpuExecutor(engine, self.state)
        torch.set_num_threads(usable_cores())
        load: Any = AutoModelForCausalLM.from_pretrained
        self.theirs = load(model_dir, dtype=torch.float32).eval()
        self.cache: Any = None

    def prefill_theirs(self) -> None:
        with torch.inference_mode():
            out = self.theirs(torch.tensor([self.ids]), use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values

    def prefill_ours(self, slot: int = DENSE) -> None:
        self.state.release(slot)
        top_k = self.state.config.top_k
        self.state.allocate(
            slot, prompt_tokens=len(self.ids), total_tokens=self.total, top_k=top_k, dense=slot == DENSE
        )
        for start, length in stretches(len(self.ids), STRETCH):
            end = start + length
            self.executor.context(slot, self.ids[start:end], start, end == len(self.ids), [length - 1])

    def decode_theirs(self, token: int) -> None:
        with torch.inference_mode():
            self.theirs(torch.tensor([[token]]), past_key_values=self.cache, use_cache=True)

    def decode_ours(self, slot: int, token: int) -> None:
        self.executor.generation([slot], [token])


def measure(contest: Contest, repeats: int, steps: int) -> dict[str, Any]:
    """Medians in seconds, and transformers' time divided by ours (above 1: ours is faster)."""
    theirs, ours = [], []
    for _ in range(repeats):
        theirs.append(seconds(contest.prefill_theirs))
        ours.append(seconds(contest.prefill_ours))
    contest.prefill_ours(SEALED)
    seal = seconds(lambda: contest.state.seal_prompt(SEALED))
    decode: dict[str, list[float]] = {"transformers": [], "dense": [], "shadowkv": []}
    for token in contest.ids[:steps]:
        decode["transformers"].append(seconds(lambda t=token: contest.decode_theirs(t)))  # type: ignore[misc]
        decode["dense"].append(seconds(lambda t=token: contest.decode_ours(DENSE, t)))  # type: ignore[misc]
        decode["shadowkv"].append(seconds(lambda t=token: contest.decode_ours(SEALED, t)))  # type: ignore[misc]
    medians = {k: statistics.median(v) for k, v in decode.items()}
    prefill = {"transformers": statistics.median(theirs), "ours": statistics.median(ours)}
    return {
        "prompt_tokens": len(contest.ids),
        "prefill_seconds": prefill,
        "prefill_ratio": prefill["transformers"] / prefill["ours"],
        "seal_seconds": seal,
        "decode_seconds": medians,
        "decode_ratio_dense": medians["transformers"] / medians["dense"],
        "decode_ratio_shadowkv": medians["transformers"] / medians["shadowkv"],
        "hit_rate": contest.state.statistics(SEALED).hit_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output")
    o = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, EngineDirectory.open(o.engine_dir).model.vocab_size, o.tokens).tolist()
    contest = Contest(o.model_dir, o.engine_dir, ids, o.steps)
    command = f"python -m trtllm_shadowkv.bench.cpu demo/model demo/engine --tokens {o.tokens}"
    write(report(command, measure(contest, o.repeats, o.steps)), o.output)


if __name__ == "__main__":
    main()
