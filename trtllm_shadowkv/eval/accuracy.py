"""Accuracy of ShadowKV against dense attention of the same engine, on real text.

python -m trtllm_shadowkv.eval.accuracy demo/engine --output docs/results/accuracy-smollm2.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from trtllm_shadowkv import LLM, AttentionParams, SamplingParams
from trtllm_shadowkv.bench.report import report, write
from trtllm_shadowkv.eval.forced import agreement, forced_logits
from trtllm_shadowkv.eval.passphrase import passphrase
from trtllm_shadowkv.eval.prose import python_reference

DENSE, SHADOWKV = AttentionParams(mode="dense"), AttentionParams(mode="shadowkv")


def passphrases(llm: LLM, tokens: int, depths: int) -> dict[str, Any]:
    """How often each attention finds a number hidden at ``depths`` depths of a text of ``tokens`` tokens."""
    assert llm.tokenizer is not None
    found = {"dense": 0, "shadowkv": 0}
    for i in range(depths):
        hidden = passphrase(llm.tokenizer, tokens, (i + 0.5) / depths, seed=i)
        for name, attention in (("dense", DENSE), ("shadowkv", SHADOWKV)):
            answer = llm.generate_async(hidden.prompt_ids, SamplingParams(max_tokens=12), attention=attention).result()
            found[name] += hidden.found(answer.text)
    return {"tokens": tokens, "depths": depths, "found": found}


def forced_text(llm: LLM, prompt: int, positions: int, budgets: list[int]) -> list[dict[str, Any]]:
    """Next-token distributions along real text, for each budget of chunks, against dense."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(python_reference()[: 8 * (prompt + positions)], special=False)
    head, tail = ids[:prompt], ids[prompt : prompt + positions]
    exact, _ = forced_logits(llm, head, tail, DENSE)
    rows = []
    for budget in budgets:
        sparse, figures = forced_logits(llm, head, tail, AttentionParams(mode="shadowkv", top_k=budget))
        same = agreement(exact, sparse)
        rows.append(
            {
                "prompt_tokens": prompt,
                "positions": positions,
                "top_k": budget,
                "top1": same.top1,
                "kl": same.kl,
                "hit_rate": figures.hit_rate,
                "residual": figures.residual,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2000, 4000])
    parser.add_argument("--depths", type=int, default=10, help="pass phrases a length; 0: leave them out")
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--output")
    o = parser.parse_args()
    started = time.perf_counter()
    with LLM(o.engine_dir) as llm:
        k = llm.config.top_k
        results = {
            "shadowkv": llm.config.to_dict(),
            "passphrase": [passphrases(llm, n, o.depths) for n in o.lengths if o.depths],
            "forced": forced_text(llm, max(o.lengths), o.positions, [k // 4, k // 2, k]),
            "seconds": time.perf_counter() - started,
        }
    arguments = f"--lengths {' '.join(map(str, o.lengths))} --depths {o.depths} --positions {o.positions}"
    write(report(f"python -m trtllm_shadowkv.eval.accuracy demo/engine {arguments}", results), o.output)


if __name__ == "__main__":
    main()
