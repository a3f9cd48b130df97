"""What engines generate: the same with and without graphs, alone and in a batch, and with what was hidden found."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Made
from trtllm_shadowkv import LLM, AttentionParams, RequestOutput, SamplingParams
from trtllm_shadowkv.eval.passphrase import passphrase
from trtllm_shadowkv.runtime.executors.tensorrt import TensorRtExecutor

DTYPES = ["float16", "bfloat16"]
RAGGED = (10, 900, 1500, 1100, 3000, 128, 4000, 2049)


def executor_of(llm: LLM) -> TensorRtExecutor:
    executor = llm._scheduler.executor
    assert isinstance(executor, TensorRtExecutor)
    return executor


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(params=DTYPES)
def llm(request: pytest.FixtureRequest, engine: Made) -> object:
    with LLM(engine(request.param)) as llm:
        yield llm


@pytest.mark.parametrize("mode", ["dense", "shadowkv"])
def test_graphs_change_no_token(llm: LLM, text: list[int], mode: str) -> None:
    """200 tokens after 4,000 of a real text; the first step of a batch size never has a graph."""
    executor, found = executor_of(llm), []
    for graphs in (True, False, True):
        executor.graphs = graphs
        if not graphs:
            executor._graphs.clear()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        output = llm.generate(text[:4000], params, attention=AttentionParams(mode=mode))  # type: ignore[arg-type]
        assert isinstance(output, RequestOutput)
        found.append(tokens(output))
        assert bool(executor._graphs) == graphs
    assert len(found[0]) == 200
    assert found[0] == found[1] == found[2]


def test_neighbours_change_no_token(llm: LLM, text: list[int]) -> None:
    """Prompts are read between other rows' steps, so that engine contexts of both kinds alternate."""
    prompts = [text[37 * i : 37 * i + n] for i, n in enumerate(RAGGED)]
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert isinstance(together, list)
    alone = [llm.generate(prompt, params) for prompt in prompts]
    assert [tokens(o) for o in together] == [tokens(o) for o in alone]  # type: ignore[arg-type]
    assert [o.outputs[0].statistics.generated_sealed > 0 for o in together] == [n > 960 for n in RAGGED]


def test_pass_phrases_are_found_in_a_ragged_batch(llm: LLM) -> None:
    """Eight prompts of 1,100 to 2,500 tokens; 100 tokens are generated, so that many of them are sealed."""
    assert llm.tokenizer is not None
    hidden = [passphrase(llm.tokenizer, 1100 + 200 * i, (i + 0.5) / 8, seed=i) for i in range(8)]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    outputs = llm.generate([h.prompt_ids for h in hidden], params, attention=AttentionParams(mode="shadowkv"))
    assert isinstance(outputs, list)
    assert [h.found(o.outputs[0].text) for h, o in zip(hidden, outputs, strict=True)] == [True] * 8
    assert all(o.outputs[0].statistics.generated_sealed >= 80 for o in outputs)


def test_sampled_tokens_repeat(llm: LLM, text: list[int]) -> None:
    """The seed decides, not the neighbours."""
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    alone = llm.generate(text[:1500], params)
    both = llm.generate([text[:1500], text[200:900]], params)
    assert isinstance(alone, RequestOutput)
    assert isinstance(both, list)
    assert tokens(alone) == tokens(both[0])
