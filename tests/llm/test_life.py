"""How an ``LLM`` and its thread end."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny_llm import assert_drained, batch, params, prompt, running, wait_until
from tests.tiny_models import write_tiny
from trtllm_shadowkv import LLM
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.errors import StateError

# --- ends of an LLM -----------------------------------------------------------------------------------------------


def test_closing_cancels_what_is_under_way(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    handles = [llm.generate_async(prompt(n), params(3000)) for n in (5, 300, 1500, 5, 5, 5)]
    running(handles[0])
    llm.close()
    llm.close()
    assert all(h.finished for h in handles)
    assert {h.result().outputs[0].finish_reason for h in handles} == {"cancelled"}
    assert_drained(llm)
    assert not llm._worker._thread.is_alive()
    for call in (lambda: llm.generate([5]), lambda: llm.generate_async([5]), lambda: llm.generate_stream([5])):
        with pytest.raises(StateError, match="the LLM is closed"):
            call()
    handles[0].abort()


def test_closing_from_another_thread_ends_a_waiting_generate(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(batch, llm, [prompt(5)] * 6, params(3000))
        wait_until(lambda: llm._scheduler.busy, "it runs")
        llm.close()
        assert {o.outputs[0].finish_reason for o in future.result(timeout=180)} == {"cancelled"}


def test_a_forgotten_llm_ends_its_thread(engine_dir: Path) -> None:
    llm = LLM(engine_dir, threads=1)
    thread, gone = llm._worker._thread, weakref.ref(llm)
    llm.generate([5], params(2))
    handle = llm.generate_async(prompt(5), params(5000))
    del llm
    gc.collect()
    next(iter(handle))  # the handle keeps it open
    assert gone() is not None
    del handle
    gc.collect()
    assert gone() is None
    thread.join(timeout=180)
    assert not thread.is_alive()


def test_an_llm_in_an_expression_lives_as_long_as_its_request(engine_dir: Path) -> None:
    assert LLM(engine_dir, threads=1).generate_async([5, 6], params(30)).result().outputs[0].finish_reason == "length"
    deltas = list(LLM(engine_dir, threads=1).generate_stream([5, 6], params(30)))
    assert deltas[-1].finish_reason == "length"


PROGRAM = """if True:
    import os, sys, threading
    from trtllm_shadowkv import LLM, SamplingParams
    llm = LLM(sys.argv[1], threads=1)
    params = SamplingParams(max_tokens=int(sys.argv[3]), ignore_eos=True)
    what = sys.argv[2]
    print("open", flush=True)
    if what == "exit in a thread":
        threading.Thread(target=lambda: llm.generate([5] * 300, SamplingParams(max_tokens=20))).start()
    elif what == "busy":
        pid = os.fork()
        if pid == 0:
            try:
                llm.generate([5], SamplingParams(max_tokens=2))
            except Exception as e:
                print(type(e).__name__, e, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        handle = llm.generate_async([5] * 300, params)
        next(iter(handle))
    elif what == "interrupt":
        try:
            llm.generate([[5] * 300] * 6, params)
        except KeyboardInterrupt:
            scheduler = llm._scheduler
            while scheduler.busy:
                pass
            used = scheduler.used
            print("interrupted", used.live + used.sealed, used.host, llm.value_pool.used, flush=True)
            llm.generate([5], SamplingParams(max_tokens=3))
    print("end", flush=True)
"""


@pytest.fixture(scope="module")
def bare_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine in which any token can be fed back, for programs that generate without end."""
    parent = tmp_path_factory.mktemp("bare")
    return build_engine(write_tiny(parent / "m"), parent / "e", BuildConfig(max_batch_size=4)).path


@pytest.mark.parametrize("what", ["busy", "exit in a thread"])
def test_a_program_that_forgets_to_close_ends_by_itself(bare_dir: Path, what: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(bare_dir), what, "5000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "end"
    forked = "StateError the LLM is closed, or was opened by the parent process"
    assert (forked in result.stdout) == (what == "busy")


def test_an_interrupt_aborts_generate_and_leaves_the_llm_usable(bare_dir: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(bare_dir), "interrupt", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines() == ["interrupted 0 0 0", "end"]
