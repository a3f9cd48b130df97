"""Builds that are killed, run out of disk or meet each other: the engine is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv import names
from trtllm_shadowkv.build.builder import build_engine, refresh_engine, verify_engine
from trtllm_shadowkv.build.whole_directory import whole_directory
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import EngineError

SMALL = BuildConfig(shadowkv=ShadowKVConfig(top_k=16, outliers=4, window=64, dense_limit=256))

# A build that reports every weight and waits for a line before it goes on.
STEPPED_BUILD = """if True:
    import sys
    from trtllm_shadowkv.build.builder import build_engine
    def progress(done, total):
        print(done, total, flush=True)
        if sys.stdin.readline() != "go on\\n":
            sys.exit("told to end")
    build_engine(sys.argv[1], sys.argv[2], progress=progress)
    print("built", flush=True)
"""

# A build or refresh that is killed when a function is called for the nth time: module, name, n, then the call.
KILLED = """if True:
    import importlib, os, signal, sys
    from trtllm_shadowkv.build import builder
    owner, name, count, call, *arguments = sys.argv[1:]
    module, _, inner = owner.partition(":")
    target = importlib.import_module(module)
    target = getattr(target, inner) if inner else target
    original, left = getattr(target, name), int(count)
    def call_or_die(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(target, name, call_or_die)
    getattr(builder, call)(*arguments)
"""


def killed(run_python: Any, where: str, count: int, call: str, *arguments: object) -> bool:
    """Whether the process got as far as being killed."""
    process = run_python(KILLED, *where.rsplit(".", 1), count, call, *arguments)
    _, errors = process.communicate(timeout=180)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return bool(process.returncode)


def loads(path: Path) -> bool:
    try:
        EngineDirectory.open(path)
    except EngineError:
        return False
    return True


def test_a_build_killed_half_way_leaves_nothing_that_loads(
    tiny_model: Path, tmp_path: Path, run_python: Any, empty_beside: Any
) -> None:
    process = run_python(STEPPED_BUILD, tiny_model, tmp_path / "engine")
    for _ in range(5):
        process.stdout.readline()
        process.stdin.write("go on\n")
        process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert left, "the kill came too late to mean anything"
    assert not any(loads(p) for p in [*left, tmp_path / "engine"])
    build_engine(tiny_model, tmp_path / "engine", SMALL)
    verify_engine(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine")


WRITTEN = [
    *[("pathlib:Path.open", n) for n in (1, 4)],
    ("trtllm_shadowkv.build.builder.to_dtype", 9),
    ("trtllm_shadowkv.build.builder.write_config", 1),
    ("shutil.copyfile", 1),
    ("trtllm_shadowkv.build.builder.check_graph", 1),
    ("trtllm_shadowkv.build.manifest.write", 1),
    ("pathlib:Path.rename", 1),
    ("pathlib:Path.rename", 2),
    ("shutil.rmtree", 1),
    ("os.close", 1),
    ("pathlib:Path.unlink", 3),
]


@pytest.mark.parametrize(("where", "count"), WRITTEN)
def test_a_replaced_engine_survives_a_kill_at_any_point(
    tiny_model: Path, tmp_path: Path, run_python: Any, empty_beside: Any, where: str, count: int
) -> None:
    build_engine(tiny_model, tmp_path / "engine", BuildConfig(max_batch_size=3))
    assert killed(run_python, where, count, "build_engine", tiny_model, tmp_path / "engine")
    if (tmp_path / "engine").exists():  # killed between its two renames it comes back with the next build
        assert verify_engine(tmp_path / "engine").build.max_batch_size in (3, 32)
    else:
        assert (where, count) == ("pathlib:Path.rename", 2)
    build_engine(tiny_model, tmp_path / "engine", SMALL)
    verify_engine(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine")


def test_an_engine_moved_aside_by_a_killed_build_comes_back_even_if_the_next_build_fails(
    tiny_model: Path, tmp_path: Path, run_python: Any, empty_beside: Any
) -> None:
    build_engine(tiny_model, tmp_path / "engine", BuildConfig(max_batch_size=3))
    assert killed(run_python, "pathlib:Path.rename", 2, "build_engine", tiny_model, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
    with pytest.raises(EngineError, match="bytes free"), whole_directory(tmp_path / "engine", 1 << 60):
        pass
    assert verify_engine(tmp_path / "engine").build.max_batch_size == 3
    empty_beside(tmp_path / "engine", "engine")


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("os.link", 2),
        ("trtllm_shadowkv.build.builder.write_graph", 1),
        ("trtllm_shadowkv.build.builder.check_graph", 1),
        ("pathlib:Path.rename", 1),
        ("shutil.rmtree", 1),
    ],
)
def test_an_engine_survives_a_killed_refresh(
    tiny_model: Path, tmp_path: Path, run_python: Any, empty_beside: Any, where: str, count: int
) -> None:
    before = build_engine(tiny_model, tmp_path / "engine", SMALL)
    assert killed(run_python, where, count, "refresh_engine", tmp_path / "engine")
    assert verify_engine(tmp_path / "engine") == before
    assert refresh_engine(tmp_path / "engine") == before
    verify_engine(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine")


@pytest.mark.parametrize("call", ["build", "refresh"])
def test_an_interrupt_leaves_what_was_there(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_beside: Any, call: str
) -> None:
    before = build_engine(tiny_model, tmp_path / "engine", SMALL)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for where in ("trtllm_shadowkv.build.builder.write_config", "trtllm_shadowkv.build.builder.manifest.write"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(where, interrupted)
            refresh_engine(before.path) if call == "refresh" else build_engine(tiny_model, before.path, SMALL)
        assert verify_engine(before.path) == before
        empty_beside(before.path, "engine")


def test_an_interrupt_between_the_renames_is_undone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_beside: Any
) -> None:
    before = build_engine(tiny_model, tmp_path / "engine", SMALL)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if str(target).endswith(".replaced"):
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        build_engine(tiny_model, before.path, BuildConfig())
    assert verify_engine(before.path) == before
    empty_beside(before.path, "engine")


# --- full disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [0, 1000, 5000, 200_000, 440_000])
def test_a_file_that_may_not_grow_is_one_line_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, empty_beside: Any, allowed: int
) -> None:
    before = build_engine(tiny_model, tmp_path / "engine", SMALL)
    command = [sys.executable, "-m", "trtllm_shadowkv", "build", "--model-dir", str(tiny_model)]
    command += ["--output-dir", str(before.path)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, allowed)),
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: writing ")
    assert "nothing was changed" in result.stderr
    assert result.stderr.count("\n") == 1
    assert verify_engine(before.path) == before
    empty_beside(before.path, "engine")


@contextlib.contextmanager
def _small_disk(path: Path, size: str) -> Any:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tiny_model: Path, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", "300k") as disk:
        with pytest.raises(EngineError, match="bytes free; expected"):
            build_engine(tiny_model, disk / "engine", SMALL)
        assert not list(disk.iterdir())


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount command")
def test_a_disk_that_fills_up_meanwhile_is_left_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", "6m") as disk:
        before = build_engine(tiny_model, disk / "engine", SMALL)

        def fill(done: int, total: int) -> None:
            with contextlib.suppress(OSError), (disk / "other").open("ab") as file:
                for _ in range(6000):
                    file.write(b"x" * 1024)
                    file.flush()

        with pytest.raises(EngineError, match=r"No space left|writing .* failed"):
            build_engine(tiny_model, disk / "engine", SMALL, progress=fill)
        assert verify_engine(disk / "engine") == before
        assert sorted(p.name for p in disk.iterdir()) == ["engine", "other"]


# --- several at once ----------------------------------------------------------------------------------------------


def test_a_second_build_into_the_same_place_is_told_so(
    tiny_model: Path, tmp_path: Path, run_python: Any, empty_beside: Any
) -> None:
    process = run_python(STEPPED_BUILD, tiny_model, tmp_path / "engine")
    process.stdout.readline()  # it is writing
    with pytest.raises(EngineError, match="another process is writing"):
        build_engine(tiny_model, tmp_path / "engine", SMALL)
    build_engine(tiny_model, tmp_path / "other", SMALL)
    for _ in range(100):
        process.stdin.write("go on\n")
    output, errors = process.communicate(timeout=180)
    assert output.endswith("built\n"), errors
    assert verify_engine(tmp_path / "engine").build.max_batch_size == 32
    with pytest.raises(EngineError, match="another process is writing"), whole_directory(tmp_path / "engine", 0):
        refresh_engine(tmp_path / "engine")
    refresh_engine(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine", "other")


def test_many_builds_at_once_make_one_whole_engine(tiny_model: Path, tmp_path: Path, empty_beside: Any) -> None:
    outcomes: list[BaseException | EngineDirectory] = []

    def build(batch: int) -> None:
        try:
            outcomes.append(build_engine(tiny_model, tmp_path / "engine", BuildConfig(max_batch_size=batch)))
        except BaseException as e:
            outcomes.append(e)

    threads = [threading.Thread(target=build, args=(i + 1,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [o for o in outcomes if isinstance(o, EngineError) and "another process is writing" in str(o)]
    assert [o for o in outcomes if not isinstance(o, EngineDirectory) and o not in refused] == []
    assert len(refused) < len(threads)
    verify_engine(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine")


def test_a_reader_finds_a_whole_engine_while_it_is_replaced_again_and_again(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine"
    build_engine(tiny_model, path, BuildConfig(max_batch_size=1))
    done = threading.Event()

    def replace() -> None:
        for batch in range(2, 12):
            build_engine(tiny_model, path, BuildConfig(max_batch_size=batch))
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    seen = set()
    while not done.is_set():
        with contextlib.suppress(EngineError):  # read while it was renamed: refused, and never half of it
            seen.add(EngineDirectory.open(path).build.max_batch_size)
    thread.join()
    assert EngineDirectory.open(path).build.max_batch_size == 11
    assert seen <= set(range(1, 12))


# --- refresh ------------------------------------------------------------------------------------------------------


def test_a_refresh_makes_graph_and_configuration_anew_and_copies_no_weight(tiny_model: Path, tmp_path: Path) -> None:
    before = build_engine(tiny_model, tmp_path / "engine", SMALL)
    graph = (before.path / names.ONNX_FILE).read_bytes()
    inode = (before.path / names.WEIGHTS_FILE).stat().st_ino
    old = before.path / names.ONNX_FILE
    import onnx

    from trtllm_shadowkv.build import manifest

    model = onnx.load(old, load_external_data=False)
    model.producer_version = "an older version of this package"
    old.write_bytes(model.SerializeToString())
    manifest.write(before.path)
    assert refresh_engine(before.path) == before
    assert old.read_bytes() == graph
    assert (before.path / names.WEIGHTS_FILE).stat().st_ino == inode
    verify_engine(before.path)


@pytest.mark.parametrize("file", [names.ONNX_FILE, names.WEIGHTS_FILE, names.CONFIG_FILE, names.MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_a_damaged_engine_is_not_refreshed(
    tiny_model: Path, tmp_path: Path, empty_beside: Any, file: str, damage: str
) -> None:
    path = build_engine(tiny_model, tmp_path / "engine", SMALL).path / file
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    for call in (refresh_engine, verify_engine):
        with pytest.raises(EngineError):
            call(tmp_path / "engine")
    empty_beside(tmp_path / "engine", "engine")


def test_a_refresh_keeps_files_that_are_not_the_engines(tiny_model: Path, tmp_path: Path) -> None:
    path = build_engine(tiny_model, tmp_path / "engine", SMALL).path
    (path / "notes.txt").write_text("mine")
    with pytest.raises(EngineError, match=r"notes\.txt"):
        refresh_engine(path)
    assert (path / "notes.txt").read_text() == "mine"


def test_weights_that_lie_elsewhere_in_their_file_are_not_taken_for_ours(tiny_model: Path, tmp_path: Path) -> None:
    import onnx

    from trtllm_shadowkv.build import manifest

    engine = build_engine(tiny_model, tmp_path / "engine", SMALL)
    path = engine.path / names.ONNX_FILE
    model = onnx.load(path, load_external_data=False)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    entry = next(e for e in external[3].external_data if e.key == "offset")
    entry.value = str(int(entry.value) + 4096)
    path.write_bytes(model.SerializeToString())
    manifest.write(engine.path)
    with pytest.raises(EngineError, match="as this version lays them out"):
        refresh_engine(engine.path)


def test_a_link_to_an_engine_can_be_refreshed(tiny_model: Path, tmp_path: Path) -> None:
    build_engine(tiny_model, tmp_path / "engine", SMALL)
    (tmp_path / "link").symlink_to("engine")
    assert refresh_engine(tmp_path / "link").path == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert os.path.samefile(tmp_path / "link", tmp_path / "engine")
