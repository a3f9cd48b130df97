"""Settings: what is accepted, what is refused, and whether the refusal helps."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from trtllm_shadowkv.config import BuildConfig, RuntimeConfig, ShadowKVConfig, load_build_config
from trtllm_shadowkv.errors import ConfigError

WRONG_TYPES: tuple[Any, ...] = ("8", 8.0, True, [8], {"a": 8}, math.nan, b"8")


def yaml_file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


# --- fields -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chunk_size", "rank", "top_k", "outliers", "window", "dense_limit", "cache_factor"])
@pytest.mark.parametrize("value", [*WRONG_TYPES, 0, -8, 2**40])
def test_a_shadowkv_number_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"shadowkv\.{name} is "):
        ShadowKVConfig(**{name: value})


@pytest.mark.parametrize("name", ["value_dtype", "landmark_dtype"])
@pytest.mark.parametrize("value", ["e4m3", "", None, 8, ["fp8"]])
def test_a_stored_type_that_there_is_not_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"shadowkv\.{name} is .*; expected 'auto' or 'fp8'"):
        ShadowKVConfig(**{name: value})


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "max_num_tokens"])
@pytest.mark.parametrize("value", [*WRONG_TYPES, 0, -1, 2**40])
def test_a_build_number_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"build\.{name} is "):
        BuildConfig(**{name: value})


@pytest.mark.parametrize(
    "name",
    ["device_memory", "host_memory", "max_batch_size", "max_seq_len", "max_stretch", "threads", "max_queue"],
)
@pytest.mark.parametrize("value", [*WRONG_TYPES, 0, -1, 2**70])
def test_a_runtime_number_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"runtime\.{name} is "):
        RuntimeConfig(**{name: value})


@pytest.mark.parametrize("value", [None, 1, [], "fp16", "FLOAT16", ["float16"]])
def test_a_dtype_is_one_of_three(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected float32, float16 or bfloat16"):
        BuildConfig(dtype=value)


@pytest.mark.parametrize("value", [None, 1, [], "sparse", "Dense"])
def test_attention_is_one_of_two(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected 'shadowkv' or 'dense'"):
        ShadowKVConfig(attention=value)


@pytest.mark.parametrize("value", [None, "x", 5, [("window", 64)], {"window": 64}])
def test_nested_settings_are_of_their_own_kind(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"build\.shadowkv is"):
        BuildConfig(shadowkv=value)
    if not isinstance(value, dict):
        with pytest.raises(ConfigError, match=r"runtime\.shadowkv is"):
            RuntimeConfig(shadowkv=value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 12}, "expected 8 or 16"),
        ({"rank": 100}, "a multiple of 16"),
        ({"rank": 528}, "from 16 to 512"),
        ({"window": 100}, r"a multiple of chunk_size \(8\)"),
        ({"window": 8, "chunk_size": 16}, "from 16 to"),
        ({"window": 64, "dense_limit": 70}, "at least window .* = 71"),
    ],
)
def test_values_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShadowKVConfig(**settings)


def test_the_smallest_dense_limit_has_a_chunk_to_seal() -> None:
    config = ShadowKVConfig(window=64, dense_limit=71)
    assert config.sealed_chunks(72) == 1
    assert config.sealed_chunks(71) == 0
    assert config.sealed_chunks(3) == 0


def test_settings_cannot_be_changed_behind_anybodys_back() -> None:
    with pytest.raises(FrozenInstanceError):
        ShadowKVConfig().window = 8  # type: ignore[misc]


def test_every_shadowkv_setting_says_when_it_is_fixed() -> None:
    assert {f.metadata["fixed"] for f in fields(ShadowKVConfig)} == {"build", "run"}


# --- what depends on the model, and on the engine -----------------------------------------------------------------


@pytest.mark.parametrize(("width", "rank"), [(16, 16), (31, 16), (128, 128), (192, 160), (1024, 160)])
def test_the_rank_is_160_or_what_the_keys_have(width: int, rank: int) -> None:
    assert ShadowKVConfig().resolved(width).rank == rank


def test_a_rank_beyond_the_keys_is_refused() -> None:
    assert ShadowKVConfig(rank=192).resolved(192).rank == 192
    with pytest.raises(ConfigError, match=r"rank is 192; expected at most .* = 128"):
        ShadowKVConfig(rank=192).resolved(128)
    with pytest.raises(ConfigError, match="keys are 8 elements wide; expected 16 or more"):
        ShadowKVConfig().resolved(8)


def test_what_is_fixed_when_built_cannot_be_overridden() -> None:
    built = ShadowKVConfig(rank=32)
    assert built.overridden({"window": 64, "dense_limit": 100, "cache_factor": 4}).window == 64
    assert built.overridden({"rank": 32, "top_k": 256}) == built  # the same value is no change
    for name, value in (
        ("rank", 16),
        ("rank", None),
        ("top_k", 1),
        ("outliers", 1),
        ("chunk_size", 16),
        ("attention", "dense"),
    ):
        with pytest.raises(ConfigError, match=f"{name} = .*, but the engine was built with .*: build another engine"):
            built.overridden({name: value})
    with pytest.raises(ConfigError, match=r"unknown ShadowKV setting 'windw' \(did you mean 'window'\?\)"):
        built.overridden({"windw": 64})
    with pytest.raises(ConfigError, match=r"shadowkv\.window is 60"):
        built.overridden({"window": 60})


def test_dense_attention_has_no_limit() -> None:
    assert ShadowKVConfig(attention="dense").limit == math.inf
    assert ShadowKVConfig().limit == 4096


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "null\n", "{}\n", "\ufeff"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_build_config(yaml_file(tmp_path, text)) == BuildConfig()


def test_a_file_sets_what_it_names_and_keywords_win(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "dtype: float16\nmax_batch_size: 4\nshadowkv:\n  top_k: 64\n  attention: dense\n")
    config = load_build_config(path)
    assert (config.dtype, config.max_batch_size, config.shadowkv.top_k, config.shadowkv.dense) == (
        "float16",
        4,
        64,
        True,
    )
    config = load_build_config(path, dtype="bfloat16", attention="shadowkv", max_batch_size=None, max_seq_len=100)
    assert (config.dtype, config.max_batch_size, config.max_seq_len) == ("bfloat16", 4, 100)
    assert (config.shadowkv.top_k, config.shadowkv.dense) == (64, False)
    assert load_build_config(None, max_batch_size=2) == BuildConfig(max_batch_size=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- dtype\n", "holds list; expected a mapping"),
        ("[]\n", "holds list; expected a mapping"),
        ("false\n", "holds bool; expected a mapping"),
        ("0\n", "holds int; expected a mapping"),
        ("''\n", "holds str; expected a mapping"),
        ("just words\n", "holds str; expected a mapping"),
        ("dtype: float16\ndtype: float32\n", "'dtype' is set more than once"),
        ("dtype: float16\n'dtype': float16\n", "'dtype' is set more than once"),
        ("shadowkv: {top_k: 1, top_k: 2}\n", "'top_k' is set more than once"),
        ("shadowkv: {}\nshadowkv: {}\n", "'shadowkv' is set more than once"),
        ("max_batch: 4\n", r"unknown setting 'max_batch' \(did you mean 'max_batch_size'\?\)"),
        ("shadowkv:\n  topk: 4\n", r"shadowkv: unknown setting 'topk' \(did you mean 'top_k'\?\)"),
        ("1: 4\n", "unknown setting 1; expected one of dtype"),
        ("null: 4\n", "unknown setting None"),
        ("[1, 2]: 4\n", "unknown setting|is no YAML"),
        ("{a: 1}: 4\n", "is no YAML"),
        ("shadowkv:\n", "shadowkv holds NoneType; expected a mapping"),
        ("shadowkv: 5\n", "shadowkv holds int; expected a mapping"),
        ("shadowkv: [window, 64]\n", "shadowkv holds list"),
        ("max_seq_len: 1e3\n", r"config\.yaml: build\.max_seq_len is '1e3'"),
        ("max_seq_len: 1000.0\n", r"max_seq_len is 1000\.0"),
        ("max_batch_size: yes\n", "max_batch_size is True"),
        ("max_batch_size:\n", "max_batch_size is None"),
        ("shadowkv: {chunk_size: 8.0}\n", r"shadowkv: shadowkv\.chunk_size is 8\.0"),
        ("dtype: 2020-13-45\n", "is no YAML"),
        ("dtype: " + "9" * 5000 + "\n", "is no YAML|dtype is"),
        ("dtype: {\n", "is no YAML"),
        ("\tdtype: float16\n", "is no YAML"),
        ("dtype: !!python/object/apply:os.system ['true']\n", "is no YAML"),
        ("a: &a [*b]\n", "is no YAML"),
        ("dtype: float16\n---\ndtype: float32\n", "is no YAML"),
        ("[" * 5000, "is no YAML"),
        ("\0", "is no YAML"),
        (b"dtype: \xff\n", "cannot read the configuration"),
    ],
)
def test_a_file_of_another_kind_is_one_clear_error(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_build_config(yaml_file(tmp_path, text))
    assert "\n" not in str(error.value)
    assert "config.yaml" in str(error.value)


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.yaml", tmp_path / ("x" * 300), "a\0b"):
        with pytest.raises(ConfigError, match=r"cannot read the configuration|is no YAML"):
            load_build_config(path)


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("max_batch_size", 0), ("attention", "sparse")])
def test_a_bad_keyword_is_refused_as_in_a_file(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        load_build_config(None, **{name: value})
