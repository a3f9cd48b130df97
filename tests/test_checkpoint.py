"""Reading model directories: weights as transformers reads them, and every kind of damage as one clear error."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import write_tiny
from trtllm_shadowkv.checkpoint import Checkpoint, to_dtype, tokenizer_files
from trtllm_shadowkv.errors import CheckpointError, ConfigError
from trtllm_shadowkv.safetensors_file import SafetensorsFile

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BITS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}


def as_torch(array: NDArray[Any], dtype: str) -> torch.Tensor:
    bits = torch.frombuffer(bytearray(array.tobytes()), dtype=BITS[dtype])
    return bits.view(TORCH[dtype]).reshape(array.shape)


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as every writer does, so that the data is aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def fails(directory: Path, *messages: str) -> None:
    with pytest.raises(CheckpointError) as e, Checkpoint.open(directory) as checkpoint:
        checkpoint.check()
    for message in messages:
        assert message in str(e.value)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "sharded", shards=3)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_transformers_reads(tmp_path: Path, architecture: str, dtype: str, shards: int) -> None:
    write_tiny(tmp_path, architecture, dtype=TORCH[dtype], shards=shards, tied=shards == 1)
    state = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=TORCH[dtype]).state_dict()
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check()
        for name in checkpoint.config.weight_shapes():
            array, found = checkpoint.read(name)
            assert found == dtype
            assert torch.equal(as_torch(array, dtype), state[name])


def test_views_are_read_only_borrow_the_file_and_outlive_it(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        array, _ = checkpoint.read("model.embed_tokens.weight")
        again, _ = checkpoint.read("model.embed_tokens.weight")
    assert np.shares_memory(array, again)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    assert np.array_equal(array, load_file(tiny / "model.safetensors")["model.embed_tokens.weight"].numpy())


def test_a_large_file_is_neither_read_nor_copied(tmp_path: Path) -> None:
    """Eight gigabytes that exist only as a hole in the file: whoever read them would take seconds and memory."""
    config = json.loads((write_tiny(tmp_path) / "config.json").read_text())
    rows = 1 << 25
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "tie_word_embeddings": True}))
    with Checkpoint.open(tmp_path) as checkpoint:
        shapes = checkpoint.config.weight_shapes()
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    path = raw(tmp_path / "model.safetensors", header)
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + end)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check()
        array, _ = checkpoint.read("model.embed_tokens.weight")
        assert array.shape == (rows, 64)
        assert array[-1, -1] == 0


def test_unknown_name_is_an_error(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint, pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.read("nothing")


def test_missing_wrong_and_unknown_tensors_are_told_at_once(tiny: Path) -> None:
    def change(w: dict[str, torch.Tensor]) -> None:
        del w["model.norm.weight"]
        w["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 128)
        w["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.float64)
        w["model.layers.2.input_layernorm.weight"] = torch.zeros(64)

    rewrite(tiny, change)
    fails(
        tiny,
        "model.norm.weight is missing",
        "model.layers.0.mlp.up_proj.weight has shape [64, 128], expected [128, 64]",
        "model.layers.1.mlp.up_proj.weight has dtype F64, expected one of F32, F16, BF16",
        "model.layers.2.input_layernorm.weight is unknown",
    )
    with Checkpoint.open(tiny) as checkpoint, pytest.raises(CheckpointError, match="dtype F64"):
        checkpoint.read("model.layers.1.mlp.up_proj.weight")


def test_many_problems_make_a_short_message(tiny: Path) -> None:
    rewrite(tiny, lambda w: [w.pop(n) for n in list(w) if "mlp" in n])
    fails(tiny, "; and 1 more")


def test_harmless_extra_tensors_are_ignored(tmp_path: Path) -> None:
    write_tiny(tmp_path, tied=True)

    def change(w: dict[str, torch.Tensor]) -> None:
        w["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        w["lm_head.weight"] = w["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, change)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.check()


@pytest.mark.parametrize("change", [lambda w: w + 1, lambda w: w[:-1], lambda w: w.half(), lambda w: w.double()])
def test_a_tied_head_of_its_own_is_refused(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    write_tiny(tmp_path, tied=True, vocab=1500)
    rewrite(tmp_path, lambda w: w.update({"lm_head.weight": change(w["model.embed_tokens.weight"]).clone()}))
    fails(tmp_path, "lm_head.weight differs from model.embed_tokens.weight")


def test_a_tied_head_that_differs_in_its_last_value_is_refused(tmp_path: Path) -> None:
    def change(w: dict[str, torch.Tensor]) -> None:
        w["lm_head.weight"] = w["model.embed_tokens.weight"].clone()
        w["lm_head.weight"][-1, -1] += 1

    write_tiny(tmp_path, tied=True, vocab=1500)
    rewrite(tmp_path, change)
    fails(tmp_path, "lm_head.weight differs")


def test_missing_pieces(tiny: Path) -> None:
    fails(tiny / "nowhere", "is no directory")
    weights = (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    fails(tiny, "no model.safetensors", "only pytorch_model.bin", "save_pretrained")
    weights = (tiny / "pytorch_model.bin").rename(tiny / "model.safetensors")
    assert weights.is_file()
    (tiny / "config.json").unlink()
    fails(tiny, "cannot read", "config.json")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{}\n{}"])
def test_damaged_json(sharded: Path, text: bytes) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(text)
    fails(sharded, "model.safetensors.index.json is no JSON")
    (sharded / "config.json").write_bytes(text)
    fails(sharded, "config.json is no JSON")


def test_an_unsupported_model_is_a_configuration_error(tiny: Path) -> None:
    (tiny / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        Checkpoint.open(tiny)


def test_every_truncation_is_noticed(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        fails(tiny, "model.safetensors is damaged")
    path.write_bytes(whole + b"\0")
    fails(tiny, "model.safetensors is damaged", f"expected {len(whole)}")


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "no JSON"),
        (b"\xff" * 20, "no JSON"),
        (b"[]", "a JSON list"),
        (b'{"t": 1, "t": 2}', "occurs twice"),
        (b'{"t": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', "no JSON"),
        ({"t": []}, "described as"),
        ({"t": None}, "described as"),
        (entry(dtype="F33"), "described as"),
        (entry(dtype=["F32"]), "described as"),
        (entry(shape=[-2]), "described as"),
        (entry(shape=[2.0]), "described as"),
        (entry(shape=[True, 2]), "described as"),
        (entry(shape=2), "described as"),
        (entry(shape=[1 << 62] * 9), "described as"),
        (entry(shape=[3]), "takes 8 bytes"),
        (entry(data_offsets=[8, 0]), "takes -8 bytes"),
        (entry(data_offsets=[0]), "described as"),
        (entry(data_offsets=[0, 8, 8]), "described as"),
        (entry(data_offsets=[4, 12]), "begins at byte 4"),
        (entry() | {"u": entry()["t"]}, "begins at byte 0"),
        (entry() | {"u": {"dtype": "F16", "shape": [2], "data_offsets": [6, 10]}}, "begins at byte 6"),
        (entry(shape=[3], data_offsets=[0, 12]), "it has"),
    ],
)
def test_contradicting_headers(tiny: Path, header: Any, message: str) -> None:
    raw(tiny / "model.safetensors", header, b"\0" * 8)
    fails(tiny, "model.safetensors is damaged", message)


def test_a_header_length_beyond_the_file_or_reason(tiny: Path) -> None:
    for length in (1 << 63, (1 << 64) - 1, 10_000):
        (tiny / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
        fails(tiny, f"its header claims {length} bytes")


def test_a_header_with_any_byte_changed_reads_or_is_refused(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.safetensors", entry() | {"__metadata__": {"format": "pt"}}, b"\0" * 8)
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for i in range(len(whole) - 8):
        for value in (0, 0x22, 0x39, 0x7B, rng.randrange(256)):
            path.write_bytes(whole[:i] + bytes([value]) + whole[i + 1 :])
            try:
                file = SafetensorsFile(path)
                if "t" in file.entries and file.entries["t"].dtype == "F32":
                    assert not file.read("t").any()
                file.close()
            except CheckpointError:
                refused += 1
    assert refused > 200


def test_unaligned_and_empty_tensors(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "c": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [9, 9]},
        "d": {"dtype": "F16", "shape": [], "data_offsets": [9, 11]},
    }
    values = np.array([1.5, -2.0], np.float32).tobytes() + np.float16(3.0).tobytes()
    file = SafetensorsFile(raw(tmp_path / "x.safetensors", header, b"\1" + values))
    assert file.read("b").tolist() == [1.5, -2.0]
    assert file.read("b").flags.aligned
    assert file.read("c").shape == (0, 4)
    assert file.read("d").item() == 3.0


def test_links_into_a_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    cache = tmp_path / "blobs"
    cache.mkdir()
    for path in list(sharded.iterdir()):
        path.rename(cache / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    with Checkpoint.open(sharded) as checkpoint:
        checkpoint.check()


def test_index_and_shards_must_agree(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = next(iter(index["weight_map"].items()))

    def with_map(weight_map: Any) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))

    other = next(s for s in index["weight_map"].values() if s != shard)
    with_map(index["weight_map"] | {name: other})
    fails(sharded, other, f"no tensor {name}")
    outside = sharded.parent / "x.safetensors"
    outside.write_bytes((sharded / shard).read_bytes())
    for bad in ("../x.safetensors", str(outside), "sub/../../x.safetensors", "..", "", "config.json"):
        with_map(index["weight_map"] | {name: bad})
        fails(sharded, f"names the shard {bad!r}")
    for bad_map in (None, {}, [shard], {name: 3}, {name: None}):
        with_map(bad_map)
        fails(sharded, "no usable weight_map")
    path.write_text("[]")
    fails(sharded, "no usable weight_map")
    save_file(load_file(sharded / shard) | {"another": torch.zeros(1)}, sharded / "copy.safetensors")
    with_map(index["weight_map"] | {"another": "copy.safetensors"})
    fails(sharded, "lies in two shards")
    with_map(index["weight_map"])
    (sharded / shard).unlink()
    fails(sharded, "cannot read", shard)


def test_tokenizer_files_are_those_that_exist(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "merges.txt", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokenizer.model").mkdir()
    assert tokenizer_files(tmp_path) == [tmp_path / "tokenizer.json", tmp_path / "merges.txt"]


def all_values(dtype: str) -> torch.Tensor:
    """Every 16-bit pattern, or float32 patterns around every rounding tie, and at random."""
    if dtype != "float32":
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(TORCH[dtype])
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = torch.cat([(high | low).flatten(), torch.randint(-(1 << 31), 1 << 31, (500_000,))])
    return patterns.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_conversion_is_that_of_torch(source: str, target: str) -> None:
    values = all_values(source)
    wanted = values.to(TORCH[target])
    fits = ~(torch.isinf(wanted) & torch.isfinite(values))
    values, wanted = values[fits], wanted[fits]
    got = as_torch(to_dtype(as_numpy(values), source, target, "w"), target)
    number = ~torch.isnan(values)
    assert torch.equal(got[number].view(BITS[target]), wanted[number].view(BITS[target]))
    assert torch.isnan(got[~number]).all()
    assert number.sum() > 30_000
    assert (~number).sum() > 100


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [65_536.0, -1e38])
def test_values_beyond_float16_are_refused(source: str, value: float) -> None:
    weights = torch.zeros(3_000_000, dtype=TORCH[source])
    weights[-1] = value
    with pytest.raises(CheckpointError, match=r"layer\.7 holds .*float16"):
        to_dtype(as_numpy(weights), source, "float16", "layer.7")


def test_the_largest_values_of_each_type_fit() -> None:
    for target, largest in (("float16", 65_519.99), ("bfloat16", 3.3895e38)):
        got = as_torch(to_dtype(np.array([largest, -largest, np.inf], np.float32), "float32", target, "w"), target)
        assert torch.isfinite(got[:2]).all()
        assert torch.isinf(got[2])
    with pytest.raises(CheckpointError, match="w holds"):
        to_dtype(np.array([np.finfo(np.float32).max], np.float32), "float32", "bfloat16", "w")


def test_conversion_keeps_shape_order_and_the_source() -> None:
    source = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    source.flags.writeable = False
    assert to_dtype(source, "float32", "float32", "w") is source
    assert to_dtype(source, "float32", "float16", "w").tolist() == source.tolist()
    assert to_dtype(np.empty((0, 4), np.float32), "float32", "bfloat16", "w").shape == (0, 4)
    with pytest.raises(TypeError, match="bfloat16 array holds float32"):
        to_dtype(source, "bfloat16", "float32", "w")
