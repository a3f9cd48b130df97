"""What a build makes of sound models, and says about unsound ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tiny
from trtllm_shadowkv import names
from trtllm_shadowkv.build import manifest
from trtllm_shadowkv.build.builder import build_engine, refresh_engine, verify_engine
from trtllm_shadowkv.build.llama_graph import head_weight, weights
from trtllm_shadowkv.config import BuildConfig, ShadowKVConfig
from trtllm_shadowkv.engine_directory import EngineDirectory
from trtllm_shadowkv.errors import CheckpointError, ConfigError, EngineError, MissingDependencyError, ShadowKVError

SMALL = BuildConfig(shadowkv=ShadowKVConfig(top_k=16, outliers=4, window=64, dense_limit=256))
Change = Callable[[Path], None]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def stored(engine: EngineDirectory) -> dict[str, bytes]:
    """Bytes of every weight, found by what the ONNX file says."""
    data = (engine.path / names.WEIGHTS_FILE).read_bytes()
    graph = onnx.load(engine.path / names.ONNX_FILE, load_external_data=False).graph
    found = {}
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {e.key: e.value for e in tensor.external_data}
            assert where["location"] == names.WEIGHTS_FILE
            assert int(where["offset"]) % 4096 == 0
            found[tensor.name] = data[int(where["offset"]) : int(where["offset"]) + int(where["length"])]
    return found


# --- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_weights_file_holds_every_weight_in_the_dtype_asked_for(
    tiny_model: Path, tmp_path: Path, dtype: Any
) -> None:
    engine = build_engine(tiny_model, tmp_path / "engine", replace(SMALL, dtype=dtype))
    found = stored(engine)
    source = load_file(tiny_model / "model.safetensors")
    for weight in weights(engine.model, dtype):
        expected = torch.cat([source[s] for s in weight.sources]).to(getattr(torch, weight.dtype))
        assert found[weight.name] == expected.view(torch.uint8).numpy().tobytes(), weight.name
    assert len(found) == len(list(weights(engine.model, dtype)))
    assert engine.build.dtype == dtype


def test_weights_of_another_type_in_the_same_bytes_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """A directory whose head is bfloat16, as earlier versions wrote it, must not be read as float16."""
    engine = build_engine(tiny_model, tmp_path / "engine", replace(SMALL, dtype="bfloat16"))
    path = engine.path / names.ONNX_FILE
    graph = onnx.load(path, load_external_data=False)
    for tensor in graph.graph.initializer:
        if tensor.name == head_weight(engine.model):
            assert tensor.data_type == onnx.TensorProto.FLOAT16
            tensor.data_type = onnx.TensorProto.BFLOAT16
    path.write_bytes(graph.SerializeToString())
    manifest.write(engine.path)
    before = {p.name: p.read_bytes() for p in engine.path.iterdir()}
    for act in (verify_engine, refresh_engine):
        with pytest.raises(EngineError, match=r"does not hold the weights|onnx\.checker refuses"):
            act(engine.path)
    assert {p.name: p.read_bytes() for p in engine.path.iterdir()} == before


def test_a_sharded_model_makes_the_same_engine(tiny_model: Path, tmp_path: Path) -> None:
    sharded = write_tiny(tmp_path / "sharded", shards=3)
    one, many = build_engine(tiny_model, tmp_path / "one", SMALL), build_engine(sharded, tmp_path / "many", SMALL)
    for name in (names.WEIGHTS_FILE, names.ONNX_FILE, names.CONFIG_FILE):
        assert (one.path / name).read_bytes() == (many.path / name).read_bytes()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        (
            "llama",
            {
                "tied": True,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
        ),
        ("mistral", {"kv_heads": 1}),
        ("qwen2", {"tied": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checker_accepts_the_file_and_our_ops_have_declared_shapes(
    tmp_path: Path, architecture: str, options: dict[str, Any], dtype: Any
) -> None:
    engine = build_engine(
        write_tiny(tmp_path / "m", architecture, **options), tmp_path / "e", replace(SMALL, dtype=dtype)
    )
    onnx.checker.check_model(str(engine.path / names.ONNX_FILE), full_check=True)
    graph = onnx.load(engine.path / names.ONNX_FILE, load_external_data=False).graph
    declared = {v.name: v.type.tensor_type for v in graph.value_info}
    m, kv = engine.model, engine.build.shadowkv
    query = m.num_heads * m.head_size
    selection = ("batch", m.num_kv_heads, kv.top_k)
    shapes: dict[str, list[tuple[str | int, ...]]] = {
        names.LANDMARK_TOPK: [("num_tokens", query), selection],
        names.KEY_RECONSTRUCT: [(1,)],
        names.SPARSE_ATTENTION: [("num_tokens", query)],
    }
    ours = [n for n in graph.node if n.domain == names.DOMAIN]
    assert len(ours) == 3 * m.num_layers
    for node in ours:
        for output, expected in zip(node.output, shapes[node.op_type], strict=True):
            shape = declared[output].shape.dim
            assert tuple(d.dim_param or d.dim_value for d in shape) == expected, (node.op_type, output)
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert set(attributes) == {*names.ATTRIBUTES, "plugin_namespace", "plugin_version"}
        assert attributes["plugin_namespace"] == names.DOMAIN.encode()
        assert (attributes["rank"], attributes["top_k"]) == (kv.rank, kv.top_k)


def test_the_configuration_is_in_the_shape_that_tensorrt_llm_writes(tiny_model: Path, tmp_path: Path) -> None:
    build_engine(tiny_model, tmp_path / "engine", replace(SMALL, max_seq_len=1000, max_batch_size=3))
    data = json.loads((tmp_path / "engine" / names.CONFIG_FILE).read_text())
    assert set(data) == {"version", "pretrained_config", "build_config", "shadowkv"}
    assert data["pretrained_config"]["architecture"] == "LlamaForCausalLM"
    assert data["build_config"]["max_seq_len"] == 1000
    assert data["build_config"]["max_batch_size"] == 3
    assert data["shadowkv"]["rank"] == 32  # all that the keys of two heads of 16 have


def test_nothing_but_the_engine_is_left(model: Path, tmp_path: Path, empty_beside: Any) -> None:
    build_engine(model, tmp_path / "engine", SMALL)
    build_engine(model, tmp_path / "engine", SMALL)
    empty_beside(tmp_path / "engine", "engine", "model")
    verify_engine(tmp_path / "engine")


def test_the_largest_model_is_never_in_memory_twice(demo_model: Path, tmp_path: Path) -> None:
    """Pages of the mapped file count as well, so that one model and its largest tensor are the floor."""
    code = """if True:
        import resource, sys
        import numpy, onnx
        from trtllm_shadowkv.build.builder import build_engine
        from trtllm_shadowkv.config import BuildConfig
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        build_engine(sys.argv[1], sys.argv[2], BuildConfig(dtype=sys.argv[3]))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    size = (demo_model / "model.safetensors").stat().st_size
    embedding = 49_152 * 576 * 4
    for dtype in ("float32", "float16"):
        command = [sys.executable, "-c", code, str(demo_model), str(tmp_path / dtype), dtype]
        grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
        assert grown < size + 1.25 * embedding, f"{dtype}: {grown / size:.2f} models"
        shutil.rmtree(tmp_path / dtype)


# --- limits and settings ------------------------------------------------------------------------------------------


def test_a_sequence_length_beyond_the_models_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len is 16385; expected at most .* 16384"):
        build_engine(tiny_model, tmp_path / "engine", replace(SMALL, max_seq_len=16_385))
    assert not (tmp_path / "engine").exists()


def test_a_very_short_sequence_length_is_no_error_of_another_setting(tiny_model: Path, tmp_path: Path) -> None:
    engine = build_engine(tiny_model, tmp_path / "engine", replace(SMALL, max_seq_len=2))
    assert (engine.max_seq_len, engine.build.max_num_tokens) == (2, 2)


def test_a_rank_beyond_the_keys_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank is 48; expected at most .* = 32"):
        build_engine(tiny_model, tmp_path / "engine", BuildConfig(shadowkv=ShadowKVConfig(rank=48)))


def test_keys_narrower_than_any_rank_are_refused_as_such(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow", hidden=32, kv_heads=1)
    with pytest.raises(ConfigError, match="keys are 8 elements wide"):
        build_engine(narrow, tmp_path / "engine", BuildConfig())


def test_engine_only_says_what_is_missing_and_writes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="engine_only"):
        build_engine(tiny_model, tmp_path / "engine", SMALL, engine_only=True)
    assert not list(tmp_path.iterdir())


# --- end tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 7}, (2, 7)),
        ({"eos_token_id": [7, 2, 9, 7]}, (2, 7, 9)),
    ],
)
def test_end_tokens_of_the_generation_config_end_answers_too(
    model: Path, tmp_path: Path, generation: Any, expected: tuple[int, ...]
) -> None:
    path = model / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    engine = build_engine(model, tmp_path / "engine", SMALL)
    assert engine.model.eos_token_ids == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "generation_config.json cannot be read"),
        ("{", "generation_config.json cannot be read"),
        ("\ud800", "generation_config.json cannot be read"),
        ("[" * 100_000, "generation_config.json cannot be read"),
        ("[1]", "generation_config.json holds list"),
        ('{"eos_token_id": "2"}', "eos_token_id is '2'"),
        ('{"eos_token_id": [2, true]}', "eos_token_id is"),
        ('{"eos_token_id": -1}', "eos_token_id is -1"),
        ('{"eos_token_id": 256}', "eos_token_id 256; expected at most 255"),
    ],
)
def test_a_malformed_generation_config_is_a_clear_error(model: Path, tmp_path: Path, text: str, message: str) -> None:
    (model / "generation_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        build_engine(model, tmp_path / "engine", SMALL)
    assert not (tmp_path / "engine").exists()


def test_an_end_token_the_model_does_not_have_is_refused_when_it_is_built(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 300]}))
    with pytest.raises(ConfigError, match="eos_token_id 300; expected at most 255"):
        build_engine(model, tmp_path / "engine", SMALL)


# --- damaged models -----------------------------------------------------------------------------------------------


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _cut(bytes_left: int) -> Change:
    def change(model: Path) -> None:
        os.truncate(model / "model.safetensors", bytes_left)

    return change


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    def spoil(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()
        save_file(tensors, model / "model.safetensors")

    return spoil


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_weights, "has no model.safetensors"),
        (_cut(0), "damaged"),
        (_cut(7), "damaged"),
        (_cut(1000), "damaged"),
        (_cut(400_000), "damaged"),
        (_tensor(NORM, lambda t: None), "model.norm.weight is missing"),
        (_tensor(NORM, lambda t: t.to(torch.int64)), "model.norm.weight has dtype I64"),
        (_tensor(NORM, lambda t: t.to(torch.float64)), "model.norm.weight has dtype F64"),
        (_tensor(HEAD, lambda t: t.T), r"lm_head.weight has shape \[64, 256\]"),
        (_tensor(HEAD, lambda t: t[:255]), r"lm_head.weight has shape \[255, 64\]"),
        (_tensor(HEAD, lambda t: t[:0]), r"lm_head.weight has shape \[0, 64\]"),
    ],
)
def test_a_damaged_model_is_an_error_and_the_engine_that_was_there_stays(
    model: Path, tmp_path: Path, empty_beside: Any, spoil: Change, message: str
) -> None:
    before = build_engine(model, tmp_path / "engine", SMALL)
    spoil(model)
    with pytest.raises(CheckpointError, match=message):
        build_engine(model, tmp_path / "engine", SMALL)
    with pytest.raises(CheckpointError, match=message):
        build_engine(model, tmp_path / "new", SMALL)
    assert verify_engine(tmp_path / "engine") == before
    empty_beside(tmp_path / "engine", "engine", "model")


def test_a_weight_beyond_float16_is_found_while_writing_and_leaves_nothing(
    model: Path, tmp_path: Path, empty_beside: Any
) -> None:
    _tensor(NORM, lambda t: t.index_fill(0, torch.tensor([5]), 70_000.0))(model)
    with pytest.raises(CheckpointError, match=r"model.norm.weight holds 70000; .* float16; build with another dtype"):
        build_engine(model, tmp_path / "engine", replace(SMALL, dtype="float16"))
    empty_beside(tmp_path / "engine", "model")
    build_engine(model, tmp_path / "engine", replace(SMALL, dtype="bfloat16"))


def test_nan_and_infinite_weights_are_kept_as_they_are(model: Path, tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
    _tensor(NORM, lambda t: torch.cat((odd, t[3:])))(model)
    engine = build_engine(model, tmp_path / "engine", replace(SMALL, dtype="float16"))
    assert np.array_equal(np.frombuffer(stored(engine)["final_norm"], np.float16)[:3], odd.numpy(), equal_nan=True)


# --- where it is written ------------------------------------------------------------------------------------------


def test_the_model_directory_is_no_place_for_the_engine(model: Path) -> None:
    before = sorted(p.name for p in model.iterdir())
    with pytest.raises(EngineError, match="belongs to no engine"):
        build_engine(model, model, SMALL)
    assert sorted(p.name for p in model.iterdir()) == before


def test_an_engine_inside_the_model_directory_is_fine(model: Path) -> None:
    build_engine(model, model / "deep" / "engine", SMALL)
    build_engine(model, model / "deep" / "engine", SMALL)
    assert (model / "model.safetensors").is_file()


def test_a_model_inside_the_engine_directory_is_not_deleted_with_it(model: Path, tmp_path: Path) -> None:
    build_engine(model, tmp_path / "engine", SMALL)
    inside = Path(shutil.move(model, tmp_path / "engine" / "model"))
    with pytest.raises(EngineError, match=r"holds 'model', which belongs to no engine"):
        build_engine(inside, tmp_path / "engine", SMALL)
    assert (inside / "model.safetensors").is_file()


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 1}', '{"name": "a web app"}', "[]", "nonsense"])
def test_a_directory_with_a_strangers_manifest_is_not_deleted(tiny_model: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text(content)
    with pytest.raises(EngineError, match=r"manifest.json', which belongs to no engine"):
        build_engine(tiny_model, tmp_path / "app", SMALL)
    assert (tmp_path / "app" / "manifest.json").read_text() == content


def test_a_file_that_was_put_beside_the_engine_is_not_deleted(tiny_model: Path, tmp_path: Path) -> None:
    build_engine(tiny_model, tmp_path / "engine", SMALL)
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    with pytest.raises(EngineError, match=r"notes\.txt"):
        build_engine(tiny_model, tmp_path / "engine", SMALL)
    assert (tmp_path / "engine" / "notes.txt").read_text() == "mine"


def test_an_engine_of_another_schema_can_be_replaced(tiny_model: Path, tmp_path: Path) -> None:
    build_engine(tiny_model, tmp_path / "engine", SMALL)
    path = tmp_path / "engine" / names.MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(EngineError, match="schema 99"):
        EngineDirectory.open(tmp_path / "engine")
    build_engine(tiny_model, tmp_path / "engine", SMALL)


@pytest.mark.parametrize("name", ["with space", "größe-模型", ".hidden", "x" * 240, "percent%20", "-dash"])
def test_any_name_will_do(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        engine = build_engine(tiny_model, f"{name}/", SMALL)
        assert engine.path == Path(name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_working_directory_cannot_be_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", "", "../here", tmp_path / "here"):
        with pytest.raises(EngineError, match="is the working directory"):
            build_engine(tiny_model, path, SMALL)
    build_engine(tiny_model, "below", SMALL)


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="/dev/shm is no mount point here")
def test_a_mount_point_cannot_be_replaced(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="is a mount point"):
        build_engine(tiny_model, "/dev/shm", SMALL)


def test_a_link_stays_a_link_and_its_target_is_replaced(model: Path, tmp_path: Path, empty_beside: Any) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "engine"
    link.symlink_to("disk/engine")  # dangling at first
    for _ in range(2):
        build_engine(model, link, SMALL)
        assert link.is_symlink()
        assert verify_engine(tmp_path / "disk" / "engine").model == verify_engine(link).model
    empty_beside(tmp_path / "disk" / "engine", "engine")
    empty_beside(link, "disk", "engine", "model")


@pytest.mark.parametrize("path", ["file", "file/below", "\0", "y" * 300, "z/" + "y" * 300, "loop"])
def test_an_output_that_cannot_be_is_one_error(tiny_model: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EngineError):
        build_engine(tiny_model, tmp_path / path, SMALL)
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("path", ["nowhere", "file", "\0", "y" * 300])
def test_a_model_directory_that_is_none_is_one_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(ShadowKVError):
        build_engine(tmp_path / path, tmp_path / "engine", SMALL)
    assert not (tmp_path / "engine").exists()
