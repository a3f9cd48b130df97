"""Engines compiled by TensorRT-RTX, which needs no GPU for it, and by a module that plays TensorRT."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtllm_shadowkv
from tests.tiny_models import write_tiny
from trtllm_shadowkv import library, names
from trtllm_shadowkv.build import tensorrt_engine, tensorrt_modules
from trtllm_shadowkv.build.builder import build_engine, refresh_engine, verify_engine
from trtllm_shadowkv.build.tensorrt_compile import Phases, shapes
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import ConfigError, EngineError, MissingDependencyError

FAKE = Path(__file__).with_name("fake_tensorrt.py")
SHADOWKV = ShadowKVConfig(top_k=16, outliers=4, window=64, dense_limit=256)
RTX = BuildConfig(
    dtype="bfloat16",
    max_batch_size=4,
    max_num_tokens=512,
    backend="tensorrt-rtx",
    compute_capabilities=(80, 120),
    shadowkv=SHADOWKV,
)
FULL = replace(RTX, backend="tensorrt", compute_capabilities=())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, the smallest that the plugins have."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=64)


def listed(engine: EngineDirectory) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((engine.path / names.MANIFEST_FILE).read_text())
    return data


# --- TensorRT-RTX, for real ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_plugins_compile_into_an_engine(
    rtx: None, model: Path, tmp_path: Path, dtype: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    parts: list[tuple[int, int]] = []
    engine = build_engine(
        model, tmp_path / "e", replace(RTX, dtype=dtype), compiling=lambda done, total: parts.append((done, total))
    )
    assert engine.has_engine and engine.has_onnx
    assert (engine.path / names.ENGINE_FILE).stat().st_size > (engine.path / names.WEIGHTS_FILE).stat().st_size
    assert parts == sorted(set(parts)) and parts[-1] == (1000, 1000) and len(parts) > 10
    assert (engine.build.backend, engine.build.compute_capabilities) == ("tensorrt-rtx", (80, 120))
    data = listed(engine)
    assert (data["backend"], data["gpu_architecture"]) == ("tensorrt-rtx", "8.0+12.0")
    assert data["plugin_library_version"] == trtllm_shadowkv.__version__
    assert data["tensorrt_version"].startswith("1.")
    build = json.loads((engine.path / names.CONFIG_FILE).read_text())["build_config"]
    assert (build["backend"], build["compute_capabilities"]) == ("tensorrt-rtx", [80, 120])
    assert verify_engine(engine.path) == engine
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_damaged_engine_file_is_found(rtx: None, model: Path, tmp_path: Path) -> None:
    path = build_engine(model, tmp_path / "e", RTX).path / names.ENGINE_FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(EngineError, match=r"rank0\.engine was altered"):
        verify_engine(tmp_path / "e")


def test_engine_only_keeps_no_onnx_and_cannot_be_refreshed(rtx: None, model: Path, tmp_path: Path) -> None:
    engine = build_engine(model, tmp_path / "e", RTX, engine_only=True)
    assert engine.has_engine and not engine.has_onnx
    assert names.WEIGHTS_FILE not in {path.name for path in engine.path.iterdir()}
    assert verify_engine(engine.path) == engine
    with pytest.raises(EngineError, match=r"has no model\.onnx; expected an engine built without --engine-only"):
        refresh_engine(engine.path)
    assert verify_engine(engine.path) == engine


def test_a_refresh_compiles_again_with_the_recorded_backend_or_another(rtx: None, model: Path, tmp_path: Path) -> None:
    plain = build_engine(model, tmp_path / "e", replace(RTX, backend="onnx", compute_capabilities=()))
    assert not plain.has_engine
    assert listed(plain)["backend"] == "onnx"
    engine = refresh_engine(plain.path, backend="tensorrt-rtx", compute_capabilities=[86])
    assert engine.has_engine
    assert listed(engine)["gpu_architecture"] == "8.6"
    written = (engine.path / names.ENGINE_FILE).stat()
    assert refresh_engine(engine.path) == engine
    again = (engine.path / names.ENGINE_FILE).stat()
    assert (again.st_ino, again.st_nlink) != (written.st_ino, 2)
    assert refresh_engine(engine.path, backend="onnx") == plain
    assert listed(plain)["tensorrt_version"] is None


def test_what_a_plugin_says_is_in_the_error(rtx: None, tiny_model: Path, tmp_path: Path, empty_beside: Any) -> None:
    before = build_engine(tiny_model, tmp_path / "e", replace(RTX, backend="onnx", compute_capabilities=()))
    with pytest.raises(EngineError, match=r"parser refuses model.onnx \| .*head_size is 16; expected .* --verbose"):
        build_engine(tiny_model, tmp_path / "e", RTX)
    assert verify_engine(tmp_path / "e") == before
    empty_beside(tmp_path / "e", "e")


def test_a_compute_capability_that_it_does_not_know_is_refused_first(rtx: None, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 90; expected one that TensorRT-RTX .* 80, 86, 89, 120"):
        build_engine(model, tmp_path / "e", replace(RTX, compute_capabilities=(80, 90)))
    assert not list(tmp_path.iterdir())


def test_the_demo_model_compiles_with_its_weights_stored_once(rtx: None, demo_model: Path, tmp_path: Path) -> None:
    engine = build_engine(
        demo_model, tmp_path / "e", BuildConfig("bfloat16", backend="tensorrt-rtx", compute_capabilities=(80,))
    )
    weights = (engine.path / names.WEIGHTS_FILE).stat().st_size
    assert weights < (engine.path / names.ENGINE_FILE).stat().st_size < 1.1 * weights


# --- refusals, before anything is written -------------------------------------------------------------------------


class Plugins(SimpleNamespace):
    """What stands for the plugin library where a module plays TensorRT."""

    path = FAKE
    version = trtllm_shadowkv.__version__

    def device_info(self) -> Any:
        if not self.gpu:
            raise MissingDependencyError("no NVIDIA GPU")
        return SimpleNamespace(name="NVIDIA H200", compute_capability=(9, 0))


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that plays TensorRT, of which other processes know; its notes are in notes()."""
    folder = tmp_path_factory.mktemp("fake")
    for name in ("tensorrt", "tensorrt_rtx"):
        shutil.copyfile(FAKE, folder / f"{name}.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(library, "load", lambda: Plugins(gpu=True))
    return folder


def notes(fake: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in (fake / "log").read_text().splitlines()]
    return [line[1] for line in lines if line[0] == what]


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize(
    ("change", "gpu", "error", "message"),
    [
        ({"dtype": "float32"}, True, ConfigError, "dtype is 'float32' .* float16 or bfloat16.*--dtype bfloat16"),
        ({"max_seq_len": 99_999}, True, ConfigError, "max_seq_len is 99999"),
        ({}, False, (ConfigError, MissingDependencyError), r"no GPU to compile for \(no NVIDIA GPU\)"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    fake: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    change: dict[str, Any],
    gpu: bool,
    error: Any,
    message: str,
) -> None:
    monkeypatch.setattr(library, "load", lambda: Plugins(gpu=gpu))
    with pytest.raises(error, match=message):
        build_engine(model, tmp_path / "e", replace(FULL, backend=backend, **change))
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_message_says_what_helps(monkeypatch: pytest.MonkeyPatch, fake: Path) -> None:
    monkeypatch.setattr(library, "load", lambda: Plugins(gpu=False))
    with pytest.raises(ConfigError, match="--compute-capability 80 --compute-capability 120"):
        tensorrt_engine.prepare(replace(RTX, compute_capabilities=()))
    with pytest.raises(MissingDependencyError, match="--refresh ENGINE --backend tensorrt"):
        tensorrt_engine.prepare(FULL)


@pytest.mark.parametrize("backend", ["onnx", "tensorrt"])
def test_compute_capabilities_are_for_rtx(model: Path, tmp_path: Path, backend: Any) -> None:
    with pytest.raises(ConfigError, match=f"compute_capabilities 80, 120 with backend '{backend}'; expected none"):
        build_engine(model, tmp_path / "e", replace(RTX, backend=backend))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [(79,), (8.0,), ("80",), "80", (True,), 80])
def test_compute_capabilities_are_whole_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="compute_capabilities is"):
        replace(RTX, compute_capabilities=value)


def test_a_module_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_modules, "find_spec", lambda name: None)
    for build, module, action in (
        (FULL, "tensorrt or tensorrt_bindings", "pip install tensorrt"),
        (RTX, "tensorrt_rtx or tensorrt_rtx_bindings", "pip install --no-deps -r requirements/tensorrt.txt"),
    ):
        with pytest.raises(MissingDependencyError, match=f"not installed; expected .*{module}; .*{action}"):
            build_engine(model, tmp_path / "e", build)
    assert not list(tmp_path.iterdir())


def test_a_library_without_plugins_is_refused(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "creator")
    with pytest.raises(MissingDependencyError, match=r"has no plugin ShadowKVLandmarkTopK.* TensorRT's headers"):
        build_engine(model, tmp_path / "e", FULL)
    assert not list(tmp_path.iterdir())


def test_modules_that_cannot_be_imported_give_their_reasons(fake: Path, tmp_path: Path) -> None:
    (fake / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open')")
    (fake / "tensorrt_bindings.py").write_text("")
    message = r"tensorrt: libnvinfer.so.10: cannot open; tensorrt_bindings: it has no Builder\).*LD_LIBRARY_PATH"
    with pytest.raises(MissingDependencyError, match=message):
        tensorrt_engine.prepare(FULL)
    shutil.copyfile(FAKE, fake / "tensorrt_bindings.py")
    target = tensorrt_engine.prepare(FULL)
    assert target is not None and target.version == "10.6.0"


def test_a_folder_called_tensorrt_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_rtx").mkdir()
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert tensorrt_modules._folder("tensorrt") is None
    assert tensorrt_modules._folder("tensorrt_rtx") is None


# --- what TensorRT is asked to do ---------------------------------------------------------------------------------


def test_profiles_are_of_generation_and_context_passes() -> None:
    generation, context = shapes(24, 8192)
    assert list(generation) == list(context)
    assert set(generation.values()) == {(1, 24, 24)}
    assert context[names.INPUT_IDS] == context[names.POSITION_IDS] == (1, 8192, 8192)
    assert context[names.LAST_TOKEN_IDS] == (1, 1, 128)
    assert context[names.SEQUENCE_SLOTS] == (1, 1, 1)
    assert shapes(1, 7)[1][names.LAST_TOKEN_IDS] == (1, 1, 7)


def test_full_tensorrt_compiles_for_this_gpu(
    fake: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = build_engine(model, tmp_path / "e", FULL)
    assert (engine.path / names.ENGINE_FILE).read_bytes() == b"compiled"
    data = listed(engine)
    assert (data["backend"], data["tensorrt_version"], data["gpu_architecture"]) == ("tensorrt", "10.6.0", "9.0")
    assert set(notes(fake, "library")) == {str(FAKE)}
    assert notes(fake, "network") == [2]
    assert notes(fake, "max_aux_streams") == [0]
    assert notes(fake, "parse") == [(engine.path / names.ONNX_FILE).stat().st_size]
    expected = [{name: list(sizes) for name, sizes in inputs.items()} for inputs in shapes(4, 512)]
    assert notes(fake, "profile") == expected
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_an_api_without_progress_and_flag_compiles_too(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "old")
    assert build_engine(model, tmp_path / "e", FULL).has_engine
    assert notes(fake, "network") == [0]


def test_the_log_is_shown_when_it_is_asked_for(
    fake: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build_engine(model, tmp_path / "e", FULL, verbose=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "[I] a line of interest\na line on standard output\n"


# --- the timing cache ---------------------------------------------------------------------------------------------


def test_the_timing_cache_serves_the_next_build(fake: Path, model: Path, tmp_path: Path) -> None:
    for _ in range(3):
        build_engine(model, tmp_path / "e", FULL)
    assert notes(fake, "cache") == ["", "+", "++"]
    names_there = [path.name for path in (fake / "cache/trtllm-shadowkv").iterdir()]
    assert names_there == ["timing-tensorrt-10.6.0-NVIDIA-H200-9.0.cache"]


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)])
def test_a_damaged_timing_cache_is_ignored_with_a_message(
    fake: Path, model: Path, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = fake / "cache/trtllm-shadowkv/timing-tensorrt-10.6.0-NVIDIA-H200-9.0.cache"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    build_engine(model, tmp_path / "e", FULL)
    assert notes(fake, "cache") == [""]
    assert [record.message for record in caplog.records] == [
        f"the timing cache {path} is damaged and ignored: this build times every tactic anew"
    ]
    build_engine(model, tmp_path / "e", FULL)
    assert notes(fake, "cache") == ["", "+"]


def test_a_timing_cache_of_another_machine_is_ignored(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(model, tmp_path / "e", FULL)
    monkeypatch.setenv("FAKE", "other")
    assert build_engine(model, tmp_path / "e", FULL).has_engine
    assert notes(fake, "cache") == ["", "+", ""]
    assert "is of another machine and ignored" in caplog.text


def test_a_cache_folder_that_cannot_be_written_stops_nothing(
    fake: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fake / "cache").write_text("a file")
    assert build_engine(model, tmp_path / "e", FULL).has_engine
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(("xdg", "expected"), [("", ".cache"), ("relative", ".cache"), ("{}/x", "x")])
def test_where_the_timing_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp_path))
    path = tensorrt_engine._timing_cache("10.6.0", "NVIDIA RTX 6000/Ada ", "8.9")
    assert path == tmp_path / expected / "trtllm-shadowkv/timing-tensorrt-10.6.0-NVIDIA-RTX-6000-Ada-8.9.cache"


# --- failures and deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parse", r"its ONNX parser refuses model.onnx \| no importer for this node; run again with --verbose"),
        (
            "build",
            r"it builds no engine \| a line on standard output \| error 6 \| error 7 \| error 8; run again",
        ),
        ("abort", r"its process died of SIGABRT \| a line on standard output \| terminate called; run again"),
        ("raise", r"its process failed \| .*AttributeError: no such thing; run again"),
    ],
)
def test_a_failure_is_one_error_and_changes_nothing(
    fake: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    empty_beside: Any,
    what: str,
    message: str,
) -> None:
    before = build_engine(model, tmp_path / "e", FULL)
    monkeypatch.setenv("FAKE", what)
    for act in (lambda: build_engine(model, tmp_path / "e", FULL), lambda: refresh_engine(tmp_path / "e")):
        with pytest.raises(EngineError, match=f"TensorRT could not compile model.onnx: {message}") as error:
            act()
        assert "\n" not in str(error.value)
    assert verify_engine(tmp_path / "e") == before
    empty_beside(tmp_path / "e", "e")
    assert capfd.readouterr().err == ""


def test_a_death_without_a_word_may_be_for_lack_of_memory(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "kill")
    with pytest.raises(EngineError, match=r"died of SIGKILL.*memory"):
        build_engine(model, tmp_path / "e", FULL)
    assert not list(tmp_path.iterdir())


def test_a_death_while_it_is_loaded_comes_before_the_weights(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "start")
    with pytest.raises(EngineError, match="TensorRT could not start: its process died of SIGABRT"):
        build_engine(model, tmp_path / "e", FULL)
    assert not list(tmp_path.iterdir())


HANGING = """if True:
    import sys
    from types import SimpleNamespace
    sys.path.insert(0, sys.argv[3])
    from trtllm_shadowkv import library
    from trtllm_shadowkv.build.builder import build_engine
    from trtllm_shadowkv.config import BuildConfig
    gpu = SimpleNamespace(name="GPU", compute_capability=(9, 0))
    plugins = SimpleNamespace(path=__import__("pathlib").Path(sys.argv[1]), version="1", device_info=lambda: gpu)
    library.load = lambda: plugins
    build_engine(sys.argv[1], sys.argv[2], BuildConfig("float16", backend="tensorrt"))
"""


def wait_for(condition: Any, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_compiling_process_ends_with_ours(
    fake: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Any, how: signal.Signals
) -> None:
    monkeypatch.setenv("FAKE", "hang")
    process = run_python(HANGING, model, tmp_path / "e", fake)
    wait_for(lambda: (fake / "log").exists() and notes(fake, "pid"))
    pid = notes(fake, "pid")[0]
    assert alive(pid)
    os.kill(pid, signal.SIGINT)  # a terminal's Ctrl-C reaches both; the child leaves it to us
    process.send_signal(how)
    _, errors = process.communicate(timeout=180)
    wait_for(lambda: not alive(pid), 60)
    assert process.returncode != 0
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert not list(tmp_path.iterdir())
    assert not (tmp_path / "e").exists()
    monkeypatch.setenv("FAKE", "")
    build_engine(model, tmp_path / "e", FULL)  # tidies what a killed one left
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


# --- progress -----------------------------------------------------------------------------------------------------


def test_progress_of_nested_phases_never_goes_back_and_never_over() -> None:
    phases, seen = Phases(), []

    def news() -> None:
        value = phases.news()
        if value is not None:
            seen.append(value)

    phases.start("all", None, 2)
    for child in ("a", "b", "c"):
        phases.start(child, "all", 3)
        for step in range(3):
            phases.step(child, step)
            news()
        phases.finish(child)
    phases.step("all", 0)
    news()
    phases.start("all", "all", 2)  # what should not happen does no harm
    phases.step("unknown", 5)
    phases.finish("unknown")
    phases.step("all", 9)
    news()
    assert seen == sorted(set(seen))
    assert seen[:3] == [83, 166, 250]
    assert 500 in seen and seen[-1] == 1000
