"""Sampling against exact probabilities and against slow, obvious code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from trtllm_shadowkv.errors import GenerationError, RequestError, StateError
from trtllm_shadowkv.runtime.sampling import Sampler, bad_word_ids, uniform
from trtllm_shadowkv.sampling_params import SamplingParams

Floats = NDArray[np.float32]


def random_logits(rng: np.random.Generator, vocab: int, scale: float = 2.0) -> Floats:
    return (rng.normal(size=vocab) * scale).astype(np.float32)


def slow_edit(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], end: Sequence[int], bad: Any
) -> list[float]:
    """Penalties and forbidden tokens, a token at a time."""
    z = [float(x) for x in logits]
    for t in range(len(z)):
        if params.repetition_penalty is not None and (t in prompt or t in output):
            z[t] = z[t] / params.repetition_penalty if z[t] > 0 else z[t] * params.repetition_penalty
        if t in output:
            z[t] -= params.presence_penalty or 0.0
            z[t] -= (params.frequency_penalty or 0.0) * list(output).count(t)
        if t in (params.bad_token_ids or ()):
            z[t] = -math.inf
        if len(output) < (params.min_tokens or 0) and (t in end or t in (params.stop_token_ids or ())):
            z[t] = -math.inf
    history = [*prompt, *output]
    for word in bad:
        if len(word) == 1 or (len(history) >= len(word) - 1 and tuple(history[1 - len(word) :]) == tuple(word[:-1])):
            z[word[-1]] = -math.inf
    return z


def slow_distribution(z: Sequence[float], params: SamplingParams) -> list[tuple[int, float]]:
    """Tokens in sampling order with their probabilities after temperature, top_k, min_p and top_p."""
    temperature = 1.0 if params.temperature is None else params.temperature
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((z[t] - z[order[0]]) / temperature) for t in order]
    kept = [(t, w) for t, w in zip(order, weights, strict=True) if w >= (params.min_p or 0.0)]
    total = math.fsum(w for _, w in kept)
    if params.top_p is not None:
        reached, count = 0.0, 0
        while count < len(kept) and reached < params.top_p * total:
            reached += kept[count][1]
            count += 1
        kept = kept[: max(1, count)]
        total = math.fsum(w for _, w in kept)
    return [(t, w / total) for t, w in kept]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_k": 1000},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "min_p": 0.02, "top_p": 0.9},
    {"top_k": 0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_frequencies_match_exact_probabilities(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    logits = random_logits(np.random.default_rng(1), 24, 1.5)
    exact = dict(slow_distribution([float(x) for x in logits], params))
    sampler = Sampler(params, 24, seed=7)
    draws = 6000
    counts = np.bincount([sampler.sample(logits, [1], [], p).token_id for p in range(draws)], minlength=24)
    assert set(np.flatnonzero(counts)) <= set(exact)
    # Rare tokens together in one bin, as the test's approximation asks for.
    common = [t for t in exact if exact[t] * draws >= 8]
    observed = [int(counts[t]) for t in common]
    expected = [exact[t] * draws for t in common]
    if len(common) < len(exact):
        observed.append(draws - sum(observed))
        expected.append(draws - sum(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_uniform_numbers_are_uniform_and_independent() -> None:
    u = np.array([[uniform(s, i, p) for p in range(400)] for s in (0, 1, 2**64 - 1) for i in (0, 1, 127)])
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    for a in (u, u.T[:64]):  # across positions, and across seeds and answers
        correlation = np.corrcoef(a) - np.eye(len(a))
        assert abs(correlation.mean()) < 0.05
    assert len(np.unique(u)) == u.size


def test_inverse_of_the_cumulative_distribution_token_by_token() -> None:
    rng = np.random.default_rng(2)
    for case in range(150):
        settings = SETTINGS[case % len(SETTINGS)]
        params = SamplingParams(**settings)
        vocab = int(rng.integers(1, 400))
        logits = random_logits(rng, vocab)
        if case % 3 == 0:
            logits = np.round(logits).astype(np.float32)  # many ties, 0.0 and -0.0 among them
        logits[rng.random(vocab) < 0.2] = -np.inf
        if np.isneginf(logits).all():
            continue
        u = uniform(case, 0, 5)
        reached = 0.0
        for token, p in slow_distribution([float(x) for x in logits], params):  # noqa: B007
            reached += p
            if reached > u:
                break
        assert abs(reached - u) > 1e-5, "choose another seed: rounding decides"
        assert Sampler(params, vocab, seed=case).sample(logits, [], [], 5).token_id == token


def test_edits_match_the_obvious_implementation() -> None:
    rng = np.random.default_rng(3)
    vocab = 40
    for case in range(120):
        params = SamplingParams(
            max_tokens=100,
            min_tokens=[None, 3, 12][case % 3],
            repetition_penalty=[None, 1.3, 0.8, 1.0][case % 4],
            presence_penalty=[None, 0.5, -1.0][case % 3],
            frequency_penalty=[0.4, None, -0.2][case % 3],
            bad_token_ids=[int(x) for x in rng.integers(0, vocab, case % 4)],
            stop_token_ids=[3, 4],
        )
        bad = [tuple(int(x) for x in rng.integers(0, 6, rng.integers(1, 4))) for _ in range(case % 7)]
        prompt = [int(x) for x in rng.integers(0, 6 if bad else vocab, rng.integers(1, 20))]
        sampler = Sampler(params, vocab, seed=0, end_ids=[5], bad_words=bad)
        output: list[int] = []
        for step in range(20):
            logits = random_logits(rng, vocab)
            logits[rng.random(vocab) < 0.1] = -np.inf
            before = logits.copy()
            expected = slow_edit(logits, params, prompt, output, [5], bad)
            edited = sampler._edit(logits, prompt, output)
            np.testing.assert_allclose(edited, np.array(expected, np.float32), rtol=1e-6)
            np.testing.assert_array_equal(logits, before)
            got = sampler.sample(logits, prompt, output, len(prompt) + step).token_id
            assert got == int(np.argmax(np.array(expected, np.float32)))
            # Mostly tokens the bad words are made of, so that longer ones do come up.
            output.append(int(rng.integers(0, 6)) if step % 3 else got)
        again = Sampler(params, vocab, seed=0, end_ids=[5], bad_words=bad)
        np.testing.assert_array_equal(
            again._edit(logits, prompt, output[:7]), sampler._edit(logits, prompt, output[:7])
        )


def test_a_bad_word_is_broken_at_its_last_token_even_when_the_prompt_begins_it() -> None:
    logits = np.array([0, 1, 2, 3], np.float32)
    sampler = Sampler(SamplingParams(), 4, seed=0, bad_words=[(1, 2, 3), (2, 2)])
    assert sampler.sample(logits, [1], [2], 2).token_id == 1  # 1 2 [3] and 2 [2] are both forbidden
    assert sampler.sample(logits, [1, 2], [], 2).token_id == 1
    assert sampler.sample(logits, [0], [], 1).token_id == 3
    assert sampler.sample(logits, [], [], 0).token_id == 3
    assert sampler.sample(logits, np.array([1, 1]), np.array([0, 2]), 4).token_id == 3


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    assert bad_word_ids(["ab", "ab", "c"], lambda s: list(s.encode())) == [(97, 98), (32, 97, 98), (99,), (32, 99)]
    assert bad_word_ids(["a"], lambda s: [1]) == [(1,)]
    assert bad_word_ids(["a"], lambda s: []) == []


def test_min_tokens_holds_end_and_stop_tokens_back() -> None:
    logits = np.array([5, 4, 3, 2], np.float32)
    sampler = Sampler(SamplingParams(min_tokens=2, stop_token_ids=[1]), 4, seed=0, end_ids=[0])
    output: list[int] = []
    for _ in range(3):
        output.append(sampler.sample(logits, [2], output, 1 + len(output)).token_id)
    assert output == [2, 2, 0]


def test_a_token_depends_on_its_own_sequence_alone() -> None:
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1)
    steps = random_logits(rng, 600).reshape(1, -1) + rng.normal(size=(3, 12, 600)).astype(np.float32)

    def run(order: list[int], seeds: list[int]) -> list[list[int]]:
        samplers = [Sampler(params, 600, seed=s, index=i) for i, s in enumerate(seeds)]
        outputs: list[list[int]] = [[] for _ in seeds]
        for step in range(12):
            for row in order:
                token = samplers[row].sample(steps[row, step], [row], outputs[row], 1 + step)
                outputs[row].append(token.token_id)
        return outputs

    first = run([0, 1, 2], [1, 2, 3])
    assert run([2, 0, 1], [1, 2, 3]) == first
    assert run([1], [9, 2, 8])[1] == first[1]
    assert run([0, 1, 2], [5, 2, 3])[0] != first[0]
    # Repeating a step, or starting over in the middle, changes nothing.
    sampler = Sampler(params, 600, seed=3, index=2)
    for step in (7, 7, 2, 11):
        assert sampler.sample(steps[2, step], [2], first[2][:step], 1 + step).token_id == first[2][step]


def test_answers_of_one_request_differ_unless_greedy() -> None:
    logits = random_logits(np.random.default_rng(5), 300, 1.0)
    for params, distinct in ((SamplingParams(n=8, top_k=100), True), (SamplingParams(n=8), False)):
        tokens = [
            tuple(Sampler(params, 300, seed=0, index=i).sample(logits, [], [], p).token_id for p in range(6))
            for i in range(8)
        ]
        assert len(set(tokens)) == (8 if distinct else 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"temperature": 1e-320}])
def test_greedy_takes_the_largest_logit_and_the_lower_of_equals(settings: dict[str, Any]) -> None:
    logits = np.array([1, 7, -3, 7, 7, -np.inf], np.float32)
    params = SamplingParams(**settings)
    tokens = {Sampler(params, 6, seed=s).sample(logits, [], [], 0).token_id for s in range(30)}
    assert tokens == ({1, 3, 4} if settings.get("temperature") == 1e-320 else {1})


def test_tied_tokens_are_cut_by_id() -> None:
    logits = np.zeros(50, np.float32)
    logits[::2] = -0.0
    for top_k, top_p, allowed in ((3, None, 3), (None, 0.1, 5), (10, 0.4, 4)):
        sampler = Sampler(SamplingParams(top_k=top_k, top_p=top_p), 50, seed=0)
        assert {sampler.sample(logits, [], [], p).token_id for p in range(200)} == set(range(allowed))


@pytest.mark.parametrize("settings", [{}, *SETTINGS])
def test_one_possible_token(settings: dict[str, Any]) -> None:
    only = np.full(100, -np.inf, np.float32)
    only[42] = -1e30
    for p in range(20):
        assert Sampler(SamplingParams(**settings), 100, seed=p).sample(only, [], [], p).token_id == 42
        got = Sampler(SamplingParams(logprobs=3, **settings), 1, seed=p).sample(np.array([-5], np.float32), [], [], p)
        assert (got.token_id, got.logprob, got.top) == (0, 0.0, [(0, 0.0)])


def test_extreme_settings_stay_finite() -> None:
    logits = np.array([3e38, -3e38, 1e38, -np.inf], np.float32)
    with np.errstate(all="raise"):
        for settings in ({"temperature": 1e-300}, {"temperature": 1e300}, {"top_p": 1e-300}, {"top_k": 2**31 - 1}):
            got = Sampler(SamplingParams(logprobs=4, **settings), 4, seed=1).sample(logits, [], [], 0)
            assert got.token_id != 3
        harsh = SamplingParams(temperature=1.0, repetition_penalty=0.001, frequency_penalty=-1000)
        assert Sampler(harsh, 4, seed=1).sample(logits, [0, 1, 2, 3], [0, 1, 2, 3], 4).token_id != 3


def test_logprobs_are_of_the_raw_logits() -> None:
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 1000)
    logits[5] = -np.inf
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(
        temperature=0.3, top_k=50, logprobs=4, bad_token_ids=[int(logits.argmax())], repetition_penalty=2.0
    )
    got = Sampler(params, 1000, seed=3).sample(logits, [1, 2, 3], [4], 4)
    assert got.logprob == pytest.approx(exact[got.token_id], abs=1e-6)
    assert [t for t, _ in got.top] == list(np.argsort(-exact)[:4])  # the forbidden token is the first of them
    assert [p for _, p in got.top] == pytest.approx(np.sort(exact)[::-1][:4], abs=1e-6)
    assert Sampler(SamplingParams(logprobs=0), 1000, seed=0).sample(logits, [], [], 0).top == []
    assert Sampler(SamplingParams(), 1000, seed=0).sample(logits, [], [], 0).logprob is None
    many = Sampler(SamplingParams(logprobs=1024), 1000, seed=0).sample(logits, [], [], 0)
    assert len(many.top) == 999  # without the one of probability zero
    tied = Sampler(SamplingParams(logprobs=2), 5, seed=0).sample(np.zeros(5, np.float32), [], [], 0)
    assert [t for t, _ in tied.top] == [0, 1]
    assert [p for _, p in tied.top] == pytest.approx([-math.log(5)] * 2)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"top_k": 3, "repetition_penalty": 2.0}])
@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, r"\+inf")])
def test_logits_that_are_no_numbers(settings: dict[str, Any], value: float, name: str) -> None:
    logits = np.zeros(9, np.float32)
    logits[4] = value
    with pytest.raises(GenerationError, match=rf"{name} logits at position 17 \(token 4\)"):
        Sampler(SamplingParams(**settings), 9, seed=0).sample(logits, [1], [], 17)


def test_every_token_forbidden() -> None:
    none = np.full(4, -np.inf, np.float32)
    for params in (SamplingParams(), SamplingParams(top_p=0.5)):
        with pytest.raises(GenerationError, match="every token is forbidden at position 3"):
            Sampler(params, 4, seed=0).sample(none, [], [], 3)
    params = SamplingParams(bad_token_ids=[0, 1], min_tokens=1, temperature=1.0)
    sampler = Sampler(params, 4, seed=0, end_ids=[2], bad_words=[(1, 3)])
    with pytest.raises(GenerationError, match="relax the request"):
        sampler.sample(np.zeros(4, np.float32), [1], [], 1)
    assert sampler.sample(np.zeros(4, np.float32), [0], [], 1).token_id == 3
    with pytest.raises(RequestError, match="every token of the vocabulary"):
        Sampler(SamplingParams(bad_token_ids=range(4)), 4, seed=0)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"bad_token_ids": [8]}, {}, "bad token 8"),
        ({"stop_token_ids": [0, 99]}, {}, "end or stop token 99"),
        ({}, {"end_ids": [-1]}, "end or stop token -1"),
        ({}, {"bad_words": [(1, 8, 2)]}, "bad word's token 8"),
    ],
)
def test_token_ids_outside_the_vocabulary(settings: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"{message}; expected token ids from 0 to 7"):
        Sampler(SamplingParams(**settings), 8, seed=0, **more)


def test_calls_outside_the_contract() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=1.1), 8, seed=0)
    wrong: Any
    for wrong in (np.zeros(9, np.float32), np.zeros((1, 8), np.float32), np.zeros(8, np.float64)):
        with pytest.raises(StateError, match="logits are"):
            sampler.sample(wrong, [], [], 0)
    for ids in ([-1], [8]):
        with pytest.raises(StateError, match="token ids from"):
            Sampler(SamplingParams(repetition_penalty=1.1), 8, seed=0).sample(np.zeros(8, np.float32), ids, [], 0)


@pytest.mark.parametrize(
    ("settings", "limit_ms"),
    [({}, 3), ({"repetition_penalty": 1.1}, 6), ({"top_k": 50, "top_p": 0.9}, 12), ({"top_p": 0.95}, 40)],
)
def test_time_of_a_step(settings: dict[str, Any], limit_ms: float) -> None:
    """Loose bounds on the fastest step after a long history; they catch work that grows with it."""
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 152_064)
    prompt = [int(t) for t in rng.integers(0, 152_064, 20_000)]
    sampler = Sampler(SamplingParams(**settings), 152_064, seed=1)
    output = [int(t) for t in rng.integers(0, 152_064, 3000)]
    sampler.sample(logits, prompt, output, 0)
    times = []
    for step in range(15):
        output.append(step)
        start = perf_counter()
        sampler.sample(logits, prompt, output, step)
        times.append((perf_counter() - start) * 1e3)
    print(f"\n{settings}: fastest {min(times):.3f} ms, median {sorted(times)[7]:.3f} ms")
    assert min(times) < limit_ms
