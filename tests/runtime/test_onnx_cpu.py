"""The CPU executor: passes through ONNX Runtime, errors, neighbours, threads, damaged engines."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from trtllm_shadowkv import names
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError, StateError
from trtllm_shadowkv.reference.state import ReferenceState
from trtllm_shadowkv.runtime.executors.cpu_state import CpuState
from trtllm_shadowkv.runtime.executors.onnx_cpu import OnnxCpuExecutor
from trtllm_shadowkv.runtime.value_pool import ValuePool

if TYPE_CHECKING:
    from tests.conftest import BuildTiny, Built

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[Any]
SHADOWKV = ShadowKVConfig(rank=16, top_k=4, outliers=3, window=16, dense_limit=64)


@pytest.fixture
def tiny(build_tiny: BuildTiny) -> Built:
    return build_tiny(BuildConfig(shadowkv=SHADOWKV))


def cpu_executor(engine: EngineDirectory, threads: int = 1, **changes: Any) -> OnnxCpuExecutor:
    config = replace(engine.build.shadowkv, **changes)
    return OnnxCpuExecutor(engine, CpuState(engine.model, config, ValuePool(1 << 28)), threads=threads)


def step(executor: OnnxCpuExecutor, slots: Sequence[int], tokens: Sequence[int]) -> Array:
    for slot in slots:
        if slot >= 0 and executor.state.must_seal(slot):
            executor.state.seal_prompt(slot)
    return executor.generation(slots, tokens)


def run(executor: OnnxCpuExecutor, ids: Sequence[int], prompt: int, slot: int = 0, dense: bool = False) -> Array:
    """Logits at the prompt's last token and at every token after it, fed from ``ids``."""
    state = executor.state
    state.allocate(slot, prompt_tokens=prompt, total_tokens=len(ids), top_k=state.config.top_k, dense=dense)
    first = executor.context(slot, ids[:prompt], 0, True, [prompt - 1])
    return np.concatenate([first, *(step(executor, [slot], [i]) for i in ids[prompt:])])


def test_both_states_give_the_same_logits(tiny: Built, text_bytes: list[int]) -> None:
    engine = tiny.engine
    for prompt in (100, 150, 20):
        ids = text_bytes[1000 : 1000 + prompt + 60]
        fast = cpu_executor(engine)
        reference = OnnxCpuExecutor(engine, ReferenceState(engine.model, engine.build.shadowkv), threads=1)
        assert np.abs(run(fast, ids, prompt) - run(reference, ids, prompt)).max() < 1e-4
        one, other = fast.state.statistics(0), reference.state.statistics(0)
        assert one.residual_lost == pytest.approx(other.residual_lost, rel=1e-4)
        assert (one.hits, one.misses, one.bytes_fetched) == (other.hits, other.misses, other.bytes_fetched)
        assert (one.sealed_tokens, one.generated_sealed) == (other.sealed_tokens, other.generated_sealed)
        assert one.sealed_tokens > 0


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_the_size_of_the_cache_changes_no_bit(kind: str, tiny: Built, text_bytes: list[int]) -> None:
    ids, results, misses = text_bytes[:200], [], []
    for factor in (1, 2, 8):
        executor = cpu_executor(tiny.engine, cache_factor=factor)
        if kind == "reference":
            config = replace(SHADOWKV, cache_factor=factor)
            executor = OnnxCpuExecutor(tiny.engine, ReferenceState(tiny.engine.model, config), threads=1)
        results.append(run(executor, ids, 150))
        misses.append(executor.state.statistics(0).misses)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    assert misses[0] > misses[1] > misses[2]


def test_any_logits_of_a_stretch_may_be_asked_for(tiny: Built, text_bytes: list[int]) -> None:
    ids = text_bytes[:90]
    executor = cpu_executor(tiny.engine)
    executor.state.allocate(0, prompt_tokens=90, total_tokens=90, top_k=4, dense=False)
    every = np.concatenate(
        [executor.context(0, ids[:50], 0, False, range(50)), executor.context(0, ids[50:], 50, True, range(40))]
    )
    assert every.shape == (90, tiny.engine.model.vocab_size) and every.dtype == np.float32
    for wanted in ([], [49], [3, 3, 0, 49], [0]):
        executor.state.release(0)
        executor.state.allocate(0, prompt_tokens=90, total_tokens=90, top_k=4, dense=False)
        some = executor.context(0, ids[:50], 0, False, wanted)
        assert some.shape == (len(wanted), tiny.engine.model.vocab_size)
        assert np.allclose(some, every[wanted], atol=1e-5)
        assert np.allclose(executor.context(0, ids[50:], 50, True, [39]), every[89:], atol=1e-5)


def test_rows_alone_and_in_a_batch(tiny: Built, text_bytes: list[int]) -> None:
    """Rows of different lengths, dense ones beside sealed ones, padding rows among them, rows that come and go."""
    rows = {s: text_bytes[s * 300 : s * 300 + 40 + 30 * s] for s in range(5)}
    prompts = {s: len(ids) - 30 for s, ids in rows.items()}
    alone = {s: run(cpu_executor(tiny.engine), ids, prompts[s], dense=s == 3) for s, ids in rows.items()}
    executor = cpu_executor(tiny.engine)
    at: dict[int, int] = {}
    for number in range(45):
        if number % 3 == 0 and (slot := number // 3) < 5:
            executor.state.allocate(
                slot, prompt_tokens=prompts[slot], total_tokens=len(rows[slot]), top_k=4, dense=slot == 3
            )
            first = executor.context(slot, rows[slot][: prompts[slot]], 0, True, [prompts[slot] - 1])
            assert np.allclose(first[0], alone[slot][0], atol=1e-5)
            at[slot] = prompts[slot]
        slots = [-1, *reversed(at)] if number % 2 else [*at, -1, -1]
        logits = step(executor, slots, [0 if s < 0 else rows[s][at[s]] for s in slots])
        assert logits.shape == (len(slots), tiny.engine.model.vocab_size)
        for b, slot in enumerate(slots):
            if slot < 0:
                assert np.isfinite(logits[b]).all()
                continue
            assert np.allclose(logits[b], alone[slot][at[slot] - prompts[slot] + 1], atol=5e-5)
            at[slot] += 1
            if at[slot] == len(rows[slot]):
                executor.state.release(slot)
                del at[slot]
    assert not at and isinstance(executor.state, CpuState) and executor.state.values.used == 0


def test_only_padding_rows(tiny: Built) -> None:
    assert np.isfinite(cpu_executor(tiny.engine).generation([-1, -1], [0, 0])).all()


def test_a_nan_token_reaches_no_other_row(build_tiny: BuildTiny, tmp_path: Path, text_bytes: list[int]) -> None:
    """An engine whose embedding of one token is NaN: the damage stays in the row that met it."""
    built = build_tiny(BuildConfig(shadowkv=SHADOWKV))
    shutil.copytree(built.engine.path, tmp_path / "engine")
    weights = np.memmap(tmp_path / "engine" / names.WEIGHTS_FILE, np.float32, "r+")
    width, bad = built.engine.model.hidden_size, 7
    assert bad not in text_bytes
    weights[bad * width : (bad + 1) * width] = np.nan  # the embedding is the file's first weight
    weights.flush()
    engine = replace(built.engine, path=tmp_path / "engine")  # its manifest would not let it be opened any more
    ids = text_bytes[:140]
    want = run(cpu_executor(engine), ids, 90)
    assert np.isfinite(want).all()
    executor = cpu_executor(engine)
    for slot in (0, 1):
        executor.state.allocate(slot, prompt_tokens=90, total_tokens=140, top_k=4, dense=False)
        executor.context(slot, ids[:90], 0, True, [89])
    for i in range(90, 140):
        logits = step(executor, [0, 1], [bad if i == 110 else ids[i], ids[i]])
        assert np.allclose(logits[1], want[i - 89], atol=1e-5)
        assert np.isnan(logits[0]).any() == (i >= 110)
    executor.state.release(0)
    run_again = run(executor, ids, 90, slot=0)
    assert np.allclose(run_again, want, atol=1e-5)


class Faulty(CpuState):
    """A state one of whose ops fails in its second layer when told to."""

    fault: BaseException | None = None
    op = ""

    def _fail(self, op: str, layer: int) -> None:
        if self.fault is not None and op == self.op and layer == 1:
            raise self.fault

    def landmark_topk(self, layer: int, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._fail("landmark_topk", layer)
        return super().landmark_topk(layer, *args)

    def key_reconstruct(self, layer: int, *args: Any) -> torch.Tensor:
        self._fail("key_reconstruct", layer)
        return super().key_reconstruct(layer, *args)

    def sparse_attention(self, layer: int, *args: Any) -> torch.Tensor:
        self._fail("sparse_attention", layer)
        return super().sparse_attention(layer, *args)


@pytest.mark.parametrize("op", ["landmark_topk", "key_reconstruct", "sparse_attention"])
@pytest.mark.parametrize(
    "fault", [StateError("found this"), ZeroDivisionError("odd"), MemoryError(), KeyboardInterrupt()], ids=repr
)
def test_an_error_in_an_op_comes_out_as_it_is(
    fault: BaseException, op: str, tiny: Built, text_bytes: list[int]
) -> None:
    """Let out of the op it would end the process. Afterwards the executor works, for other rows and the same slot."""
    state = Faulty(tiny.engine.model, SHADOWKV, ValuePool(1 << 28))
    state.op = op
    executor = OnnxCpuExecutor(tiny.engine, state, threads=1)
    ids = text_bytes[:110]
    want = run(executor, ids, 100, slot=1)
    state.allocate(0, prompt_tokens=100, total_tokens=110, top_k=4, dense=False)
    executor.context(0, ids[:50], 0, False, [49])
    state.fault = fault
    with pytest.raises(type(fault)) as caught:
        executor.context(0, ids[50:100], 50, True, [49])
    assert caught.value is fault
    state.fault = None
    state.release(0)
    state.release(1)
    state.allocate(0, prompt_tokens=100, total_tokens=110, top_k=4, dense=False)
    assert np.array_equal(executor.context(0, ids[:100], 0, True, [99]), want[:1])
    assert np.array_equal(step(executor, [0], [ids[100]]), want[1:2])
    state.fault = fault
    with pytest.raises(type(fault)) as caught:
        executor.generation([-1, 0], [0, ids[101]])
    assert caught.value is fault
    state.fault = None
    state.release(0)
    assert np.array_equal(run(executor, ids, 100, slot=0), want)


def test_refused_passes_leave_the_executor_working(tiny: Built, text_bytes: list[int]) -> None:
    executor, ids = cpu_executor(tiny.engine), text_bytes[:130]
    want = run(executor, ids, 100, slot=2)
    executor.state.release(2)
    executor.state.allocate(0, prompt_tokens=100, total_tokens=130, top_k=4, dense=False)
    executor.context(0, ids[:60], 0, False, [59])
    with pytest.raises(StateError):
        executor.generation([0], [5])
    with pytest.raises(StateError):
        executor.context(0, ids[61:100], 61, True, [38])
    with pytest.raises(StateError):
        executor.context(1, ids[:10], 0, True, [9])
    got = [executor.context(0, ids[60:100], 60, True, [39])]
    got += [step(executor, [0], [i]) for i in ids[100:]]
    assert np.allclose(np.concatenate(got), want, atol=1e-5)
    with pytest.raises(StateError, match="full"):
        executor.generation([0], [5])


def test_executors_on_two_threads_do_not_mix(build_tiny: BuildTiny, text_bytes: list[int]) -> None:
    """Engines of different shapes, and one engine twice with states of its own; one of them fails now and then."""
    engines = [
        build_tiny(BuildConfig(shadowkv=SHADOWKV)).engine,
        build_tiny(BuildConfig(shadowkv=SHADOWKV)).engine,
        build_tiny(
            BuildConfig(shadowkv=replace(SHADOWKV, top_k=2)),
            architecture="qwen3",
            layers=3,
            heads=3,
            kv_heads=1,
            hidden=48,
            head_dim=32,
        ).engine,
    ]
    texts = [text_bytes[1000 * i : 1000 * i + 180] for i in range(3)]
    alone = [run(cpu_executor(e), ids, 150) for e, ids in zip(engines, texts, strict=True)]
    executors = [cpu_executor(e) for e in engines]
    together: list[list[Array]] = [[], [], []]
    errors: list[BaseException] = []
    ready = threading.Barrier(3)

    def work(i: int) -> None:
        try:
            ready.wait(30)
            for _ in range(3):
                together[i].append(run(executors[i], texts[i], 150))
                with pytest.raises(StateError):  # the row is full, on this thread alone
                    executors[i].generation([0], [1])
                executors[i].state.release(0)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(t.is_alive() for t in threads)
    for i in range(3):
        assert all(np.array_equal(logits, alone[i]) for logits in together[i]) and len(together[i]) == 3


def test_executors_take_turns_on_one_thread(tiny: Built, text_bytes: list[int]) -> None:
    one, other = cpu_executor(tiny.engine), cpu_executor(tiny.engine)
    ids = [text_bytes[:120], text_bytes[500:620]]
    want = [run(cpu_executor(tiny.engine), i, 100) for i in ids]
    got: list[list[Array]] = [[], []]
    for executor, tokens, rows in zip((one, other), ids, got, strict=True):
        executor.state.allocate(0, prompt_tokens=100, total_tokens=120, top_k=4, dense=False)
        rows.append(executor.context(0, tokens[:100], 0, True, [99]))
    for i in range(100, 120):
        for executor, tokens, rows in zip((one, other), ids, got, strict=True):
            rows.append(step(executor, [0], [tokens[i]]))
    assert all(np.array_equal(np.concatenate(g), w) for g, w in zip(got, want, strict=True))


def test_the_number_of_threads_changes_nothing_much(tiny: Built, text_bytes: list[int]) -> None:
    ids = text_bytes[:170]
    assert np.allclose(
        run(cpu_executor(tiny.engine, 2), ids, 150), run(cpu_executor(tiny.engine, 1), ids, 150), atol=1e-4
    )


# --- engines that are not whole ---------------------------------------------------------------------------------------


def test_an_engine_without_an_onnx_file(tiny: Built) -> None:
    bare = replace(tiny.engine, files=tuple(f for f in tiny.engine.files if not f.startswith(names.ONNX_FILE)))
    with pytest.raises(EngineError, match=names.ONNX_FILE):
        cpu_executor(bare)


def damaged(engine: EngineDirectory, directory: Path) -> tuple[EngineDirectory, onnx.ModelProto]:
    shutil.copytree(engine.path, directory)
    graph = onnx.load(str(directory / names.ONNX_FILE), load_external_data=False)
    return replace(engine, path=directory), graph


def test_weights_outside_their_file(tiny: Built, tmp_path: Path) -> None:
    engine, graph = damaged(tiny.engine, tmp_path / "engine")
    for key, value in (("location", "../other.data"), ("offset", str(1 << 40)), ("length", str(1 << 40))):
        broken = onnx.ModelProto()
        broken.CopyFrom(graph)
        for entry in broken.graph.initializer[-1].external_data:
            if entry.key == key:
                entry.value = value
        (engine.path / names.ONNX_FILE).write_bytes(broken.SerializeToString())
        with pytest.raises(EngineError, match="points outside"):
            cpu_executor(engine)


def test_a_weights_file_that_was_cut(tiny: Built, tmp_path: Path) -> None:
    engine, _ = damaged(tiny.engine, tmp_path / "engine")
    path = engine.path / names.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(EngineError, match="points outside"):
        cpu_executor(engine)


def test_a_graph_that_onnx_runtime_refuses(tiny: Built, tmp_path: Path) -> None:
    engine, graph = damaged(tiny.engine, tmp_path / "engine")
    graph.graph.node[0].op_type = "NoSuchOp"
    (engine.path / names.ONNX_FILE).write_bytes(graph.SerializeToString())
    with pytest.raises(EngineError, match="refuses"):
        cpu_executor(engine)
