"""TensorRT-LLM's checkpoint format: against numbers written out here, and through our own build."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.tiny_models import write_tiny
from trtllm_shadowkv.build.builder import build_engine
from trtllm_shadowkv.checkpoint import Checkpoint
from trtllm_shadowkv.config import BuildConfig
from trtllm_shadowkv.errors import CheckpointError, ConfigError, EngineError
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.trtllm_checkpoint import TrtllmCheckpoint, write_checkpoint

LAYER, THERE = "transformer.layers.0.", "model.layers.0."

# Rows of a matrix are numbered: row r, column c of the tensor that begins at b holds b + 10 * r + c. The model has 4
# heads and 2 key/value heads of 2 elements, a hidden size of 4, 8 columns within the MLP and 5 tokens.
BEGINS = {
    "model.embed_tokens": 1000,
    "q_proj": 2000,
    "k_proj": 3000,
    "v_proj": 4000,
    "o_proj": 5000,
    "gate_proj": 6000,
    "up_proj": 7000,
    "down_proj": 8000,
    "lm_head": 9000,
}


def numbered(begin: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return (begin + 10 * np.arange(rows)[:, None] + np.arange(columns)).astype(np.float32)


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """A Hugging Face model of one layer with biases, whose numbers say where they come from."""
    model = tmp_path / "numbers"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 5,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (model / "tokenizer.json").write_text("{}")
    shapes = {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4), "o_proj": (4, 8)}
    shapes |= {"gate_proj": (8, 4), "up_proj": (8, 4), "down_proj": (4, 8)}
    weights = {
        "model.embed_tokens.weight": numbered(1000, 5, 4),
        "lm_head.weight": numbered(9000, 5, 4),
        "model.norm.weight": np.array([1, 2, 3, 4], np.float32),
        f"{THERE}input_layernorm.weight": np.array([5, 6, 7, 8], np.float32),
        f"{THERE}post_attention_layernorm.weight": np.array([9, 10, 11, 12], np.float32),
    }
    for name, (rows, columns) in shapes.items():
        part = "self_attn" if name[0] in "qkvo" else "mlp"
        weights[f"{THERE}{part}.{name}.weight"] = numbered(BEGINS[name], rows, columns)
        weights[f"{THERE}{part}.{name}.bias"] = (BEGINS[name] + 500 + np.arange(rows)).astype(np.float32)
    save_file(weights, model / "model.safetensors")
    return model


def rows(*numbers: int) -> list[list[int]]:
    """Rows of 4 columns that begin with these numbers."""
    return [[n, n + 1, n + 2, n + 3] for n in numbers]


def test_two_ranks_against_numbers_written_out(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=2, dtype="float32")
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.safetensors",
        "rank1.safetensors",
        "tokenizer.json",
    ]
    ranks = [{name: array.tolist() for name, array in load_file(out / f"rank{r}.safetensors").items()} for r in (0, 1)]
    whole = {
        "transformer.vocab_embedding.weight": rows(1000, 1010, 1020, 1030, 1040),
        "transformer.ln_f.weight": [1, 2, 3, 4],
        f"{LAYER}input_layernorm.weight": [5, 6, 7, 8],
        f"{LAYER}post_layernorm.weight": [9, 10, 11, 12],
        f"{LAYER}attention.dense.bias": [5500, 5501, 5502, 5503],
        f"{LAYER}mlp.proj.bias": [8500, 8501, 8502, 8503],
    }
    assert ranks[0] == {
        **whole,
        # heads 0 and 1 of Q, head 0 of K and of V
        f"{LAYER}attention.qkv.weight": rows(2000, 2010, 2020, 2030, 3000, 3010, 4000, 4010),
        f"{LAYER}attention.qkv.bias": [2500, 2501, 2502, 2503, 3500, 3501, 4500, 4501],
        f"{LAYER}attention.dense.weight": rows(5000, 5010, 5020, 5030),
        f"{LAYER}mlp.fc.weight": rows(6000, 6010, 6020, 6030),
        f"{LAYER}mlp.fc.bias": [6500, 6501, 6502, 6503],
        f"{LAYER}mlp.gate.weight": rows(7000, 7010, 7020, 7030),
        f"{LAYER}mlp.gate.bias": [7500, 7501, 7502, 7503],
        f"{LAYER}mlp.proj.weight": rows(8000, 8010, 8020, 8030),
        "lm_head.weight": rows(9000, 9010, 9020),
    }
    assert ranks[1] == {
        **whole,
        f"{LAYER}attention.qkv.weight": rows(2040, 2050, 2060, 2070, 3020, 3030, 4020, 4030),
        f"{LAYER}attention.qkv.bias": [2504, 2505, 2506, 2507, 3502, 3503, 4502, 4503],
        f"{LAYER}attention.dense.weight": rows(5004, 5014, 5024, 5034),
        f"{LAYER}mlp.fc.weight": rows(6040, 6050, 6060, 6070),
        f"{LAYER}mlp.fc.bias": [6504, 6505, 6506, 6507],
        f"{LAYER}mlp.gate.weight": rows(7040, 7050, 7060, 7070),
        f"{LAYER}mlp.gate.bias": [7504, 7505, 7506, 7507],
        f"{LAYER}mlp.proj.weight": rows(8004, 8014, 8024, 8034),
        "lm_head.weight": [*rows(9030, 9040), [0, 0, 0, 0]],  # 5 tokens over 2 ranks: 3 rows each
    }
    config = json.loads((out / "config.json").read_text())
    assert (config["architecture"], config["dtype"], config["vocab_size"]) == ("LlamaForCausalLM", "float32", 5)
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert config["eos_token_id"] == [2, 3]


def test_four_ranks_share_two_key_value_heads(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=4, dtype="float32")
    ranks = [load_file(out / f"rank{r}.safetensors") for r in range(4)]
    qkv = [rank[f"{LAYER}attention.qkv.weight"].tolist() for rank in ranks]
    assert qkv == [
        rows(2000, 2010, 3000, 3010, 4000, 4010),
        rows(2020, 2030, 3000, 3010, 4000, 4010),
        rows(2040, 2050, 3020, 3030, 4020, 4030),
        rows(2060, 2070, 3020, 3030, 4020, 4030),
    ]
    assert ranks[2][f"{LAYER}attention.qkv.bias"].tolist() == [2504, 2505, 3502, 3503, 4502, 4503]
    assert ranks[3][f"{LAYER}attention.dense.weight"].tolist() == [[b + 6, b + 7] for b in (5000, 5010, 5020, 5030)]
    # 5 tokens over 4 ranks: 2 rows each, and the last rank has none
    zeros = [0, 0, 0, 0]
    heads = [rank["lm_head.weight"].tolist() for rank in ranks]
    assert heads == [rows(9000, 9010), rows(9020, 9030), [*rows(9040), zeros], [zeros, zeros]]


def checkpoint_by_hand(directory: Path, **changes: Any) -> Path:
    """A checkpoint as TensorRT-LLM's converter writes it for two ranks with --use_parallel_embedding, tied."""
    directory.mkdir()
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_size": 2,
        "vocab_size": 5,
        "max_position_embeddings": 64,
        "norm_epsilon": 1e-5,
        "position_embedding_type": "rope_gpt_neox",
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": None},
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    table = np.concatenate([numbered(1000, 5, 4), np.zeros((1, 4), np.float32)])
    for r in (0, 1):
        embedding = table[3 * r : 3 * r + 3] if config["embedding_sharding_dim"] == 0 else table[:5, 2 * r : 2 * r + 2]
        weights = {
            "transformer.vocab_embedding.weight": np.ascontiguousarray(embedding),
            "transformer.ln_f.weight": np.ones(4, np.float32),
            f"{LAYER}input_layernorm.weight": np.ones(4, np.float32),
            f"{LAYER}post_layernorm.weight": np.ones(4, np.float32),
            f"{LAYER}attention.qkv.weight": numbered(2000 + 100 * r, 6, 4),
            f"{LAYER}attention.dense.weight": numbered(3000 + 2 * r, 4, 2),
            f"{LAYER}mlp.fc.weight": numbered(4000 + 20 * r, 2, 4),
            f"{LAYER}mlp.gate.weight": numbered(5000 + 20 * r, 2, 4),
            f"{LAYER}mlp.proj.weight": numbered(6000 + 2 * r, 4, 2),
            # The converter saves these tables too.
            "embed_positions": np.zeros((1, 64, 2), np.float32),
            "rotary_inv_freq": np.zeros((1, 1), np.float32),
            "embed_positions_for_gpt_attention": np.zeros((1, 128), np.float32),
        }
        save_file(weights, directory / f"rank{r}.safetensors")
    return directory


@pytest.mark.parametrize("axis", [0, 1])
def test_reading_numbers_written_out(tmp_path: Path, axis: int) -> None:
    with TrtllmCheckpoint.open(checkpoint_by_hand(tmp_path / "c", embedding_sharding_dim=axis)) as checkpoint:
        checkpoint.check()
        assert checkpoint.config.tied  # it has no lm_head and no key that says so
        for name, expected in {
            "model.embed_tokens.weight": rows(1000, 1010, 1020, 1030, 1040),
            f"{THERE}self_attn.q_proj.weight": rows(2000, 2010, 2100, 2110),
            f"{THERE}self_attn.k_proj.weight": rows(2020, 2030, 2120, 2130),
            f"{THERE}self_attn.v_proj.weight": rows(2040, 2050, 2140, 2150),
            f"{THERE}self_attn.o_proj.weight": rows(3000, 3010, 3020, 3030),
            f"{THERE}mlp.gate_proj.weight": rows(4000, 4010, 4020, 4030),
            f"{THERE}mlp.up_proj.weight": rows(5000, 5010, 5020, 5030),
            f"{THERE}mlp.down_proj.weight": rows(6000, 6010, 6020, 6030),
        }.items():
            array, kind = checkpoint.read(name)
            assert (array.tolist(), kind) == (expected, "float32"), name
        for unknown in ("lm_head.weight", "transformer.ln_f.weight"):
            with pytest.raises(CheckpointError, match=f"has no tensor {unknown}"):
                checkpoint.read(unknown)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"},
    "llama tied": {"architecture": "llama", "tied": True, "vocab": 101},
    "llama biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True, "vocab": 101},
    "mistral": {"architecture": "mistral", "dtype": torch.float16},
    "qwen2": {"architecture": "qwen2", "vocab": 101},
    "qwen2 tied": {"architecture": "qwen2", "tied": True},
    "qwen3": {"architecture": "qwen3", "head_dim": 32, "vocab": 101, "dtype": torch.bfloat16},
    "qwen3 tied": {"architecture": "qwen3", "tied": True, "shards": 3},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A Hugging Face model and the engine of it, each made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("trtllm")
            model = write_tiny(folder / "model", **MODELS[name])
            made[name] = model, build_engine(model, folder / "engine", BuildConfig(dtype=stored(name))).path
        return made[name]

    return make


def stored(name: str) -> Any:
    return str(MODELS[name].get("dtype", torch.float32)).removeprefix("torch.")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_of_the_checkpoint_has_the_same_bytes(
    tiny: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str, tp_size: int
) -> None:
    model, engine = tiny(name)
    write_checkpoint(model, tmp_path / "ckpt", tp_size=tp_size, dtype=stored(name))
    built = build_engine(
        tmp_path / "ckpt", tmp_path / "engine", BuildConfig(dtype=stored(name)), trtllm_checkpoint=True
    ).path
    files = sorted(path.name for path in engine.iterdir())
    assert sorted(path.name for path in built.iterdir()) == files
    for file in files:
        assert (built / file).read_bytes() == (engine / file).read_bytes(), file


def test_auto_is_the_models_dtype_but_float16_for_float32(
    tiny: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    for name, expected in (("llama", "float16"), ("mistral", "float16"), ("qwen3", "bfloat16")):
        out = write_checkpoint(tiny(name)[0], tmp_path / name)
        assert json.loads((out / "config.json").read_text())["dtype"] == expected
        with TrtllmCheckpoint.open(out) as checkpoint:
            checkpoint.check()
            assert {checkpoint.read(weight)[1] for weight in checkpoint.config.weight_shapes()} == {expected}


def test_conversion_rounds_as_torch_does(by_hand: Path, tmp_path: Path) -> None:
    torch_file = pytest.importorskip("safetensors.torch").load_file
    out = write_checkpoint(by_hand, tmp_path / "ckpt", dtype="bfloat16")
    found = torch_file(out / "rank0.safetensors")["lm_head.weight"]
    assert torch.equal(found, torch.from_numpy(numbered(9000, 5, 4)).to(torch.bfloat16))


def test_progress_ends_with_every_byte(by_hand: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=2, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    arrays = [a for r in (0, 1) for a in load_file(out / f"rank{r}.safetensors").values()]
    assert calls[-1] == (sum(a.nbytes for a in arrays),) * 2


def test_a_checkpoint_is_replaced_and_nothing_else(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=4)
    write_checkpoint(by_hand, out, tp_size=1)
    assert not (out / "rank1.safetensors").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(EngineError, match=r"holds 'notes\.txt', which belongs to no checkpoint"):
        write_checkpoint(by_hand, out)
    with pytest.raises(EngineError, match=r"holds 'config\.json', which belongs to no checkpoint"):
        write_checkpoint(by_hand, by_hand)
    assert (by_hand / "model.safetensors").exists()


def test_a_failure_leaves_what_was_there(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    weights = load_file(by_hand / "model.safetensors")
    weights["lm_head.weight"][-1, -1] = 1e6
    save_file(weights, by_hand / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds 1e\\+06; expected values within the range of float16"):
        write_checkpoint(by_hand, out, dtype="float16")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "numbers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0; expected a whole number of ranks"),
        ({"tp_size": True}, "tp_size is True"),
        ({"tp_size": 3}, "4 attention heads with tp_size 3; expected a tp_size that divides 4"),
        ({"tp_size": 8}, "4 attention heads with tp_size 8"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of auto, float32, float16, bfloat16"),
    ],
)
def test_arguments_that_cannot_be(by_hand: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(by_hand, tmp_path / "ckpt", **arguments)
    assert not (tmp_path / "ckpt").exists()


def edit(directory: Path, change: Callable[[dict[str, Any]], Any], *ranks: int) -> None:
    """Change the tensors of these ranks; of rank 1 where none is named."""
    for rank in ranks or (1,):
        file = directory / f"rank{rank}.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


NORM, DENSE, QKV = f"{LAYER}input_layernorm.weight", f"{LAYER}attention.dense.weight", f"{LAYER}attention.qkv.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: edit(d, lambda w: w.pop(DENSE)), r"attention\.dense\.weight of rank1\.safetensors is missing"),
        (lambda d: edit(d, lambda w: w.pop("lm_head.weight")), r"lm_head\.weight of rank1\.safetensors is missing"),
        (
            lambda d: edit(d, lambda w: w.pop("lm_head.weight"), 0, 1),
            r"lm_head\.weight of rank0\.safetensors is missing; lm_head\.weight of rank1",
        ),
        (
            lambda d: edit(d, lambda w: w.update({QKV: w[QKV].T.copy()})),
            r"attention\.qkv\.weight of rank1\.safetensors has shape \[4, 8\], expected \[8, 4\]",
        ),
        (
            lambda d: edit(d, lambda w: w.update({QKV: w[QKV].astype(np.float16)})),
            r"qkv\.weight of rank1\.safetensors has dtype F16, expected F32",
        ),
        (
            lambda d: edit(d, lambda w: w.update({QKV: w[QKV].astype(np.int8)}), 0),
            r"qkv\.weight of rank0\.safetensors has dtype I8, expected one of F32, F16, BF16",
        ),
        (
            lambda d: edit(d, lambda w: w.update({f"{LAYER}attention.kv_cache_scaling_factor": np.ones(1)})),
            r"attention\.kv_cache_scaling_factor of rank1\.safetensors is unknown",
        ),
        (
            lambda d: edit(d, lambda w: w.update({NORM: w[NORM] + 1})),
            r"input_layernorm\.weight of rank1\.safetensors differs from rank0\.safetensors's",
        ),
        (
            lambda d: (d / "rank1.safetensors").unlink(),
            r"has no rank1\.safetensors; expected 2 such files, by its mapp",
        ),
        (lambda d: cut(d / "rank1.safetensors"), r"rank1\.safetensors is damaged: it has \d+ bytes; expected \d+"),
        (lambda d: (d / "config.json").unlink(), r"cannot read .*config\.json: No such file"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json is no JSON"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds list; expected a JSON object"),
        (lambda d: edit_config(d, quantization={"quant_algo": "W4A16_AWQ"}), r"quant_algo is 'W4A16_AWQ'; expected n"),
        (lambda d: edit_config(d, mapping={"world_size": 2, "pp_size": 2}), r"pp_size is 2; expected 1"),
        (lambda d: edit_config(d, tie_word_embeddings=True), r"lm_head\.weight differs from transformer\.vocab_emb"),
        (
            lambda d: edit_config(d, use_parallel_embedding=True),
            r"vocab_embedding\.weight of rank0\.safetensors has shape \[5, 4\], expected \[3, 4\]",
        ),
        (
            lambda d: edit_config(d, use_parallel_embedding=True, embedding_sharding_dim=2),
            r"embedding_sharding_dim is 2; expected 0 or 1",
        ),
    ],
)
def test_what_is_wrong_is_one_line(by_hand: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=2, dtype="float32")
    damage(out)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error, TrtllmCheckpoint.open(out) as found:
        found.check()
    assert "\n" not in str(error.value)
    assert str(out) in str(error.value)


def test_many_faults_are_counted(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", tp_size=2, dtype="float32")
    edit(out, lambda w: [w.pop(name) for name in list(w) if name.startswith(f"{LAYER}mlp")], 0, 1)
    with TrtllmCheckpoint.open(out) as checkpoint, pytest.raises(CheckpointError, match="; and 7 more"):
        checkpoint.check()


def test_the_other_kind_of_directory(by_hand: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a Hugging Face model; expected a TensorRT-LLM checkpoint; give it"):
        TrtllmCheckpoint.open(by_hand)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; expected a TensorRT-LLM checkpoint directory"):
        build_engine(7, tmp_path / "engine", trtllm_checkpoint=True)  # type: ignore[arg-type]


def test_arrays_outlive_the_checkpoint_and_tensors_are_views(by_hand: Path, tmp_path: Path) -> None:
    out = write_checkpoint(by_hand, tmp_path / "ckpt", dtype="float32")
    with TrtllmCheckpoint.open(out) as checkpoint, Checkpoint.open(by_hand) as source:
        arrays = {name: checkpoint.read(name)[0] for name in source.config.weight_shapes()}
        expected = {name: source.read(name)[0].copy() for name in arrays}
        assert checkpoint.config.weight_shapes() == ModelConfig.weight_shapes(source.config)
    shutil.rmtree(out)
    for name, array in arrays.items():
        assert not array.flags.owndata
        assert np.array_equal(array, expected[name]), name
