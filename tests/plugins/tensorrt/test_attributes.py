"""Attributes that a plugin's creator refuses: null, and one line that says which, what was found and what expected."""

from __future__ import annotations

import re
import struct

import pytest

from tests.plugins.tensorrt.harness import Harness
from tests.plugins.tensorrt.kinds import Field, FieldType, Phase
from tests.plugins.tensorrt.ops import ATTRIBUTES, OPS, attributes, int32, int64
from trtllm_shadowkv import names

MAXIMA: dict[str, int] = {
    "layer": 1023,
    "num_heads": 512,
    "num_kv_heads": 32,
    "head_size": 128,
    "chunk_size": 16,
    "rank": 512,
    "top_k": 2048,
    "outliers": 1024,
}
MINIMA: dict[str, int] = {
    "layer": 0,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_size": 64,
    "chunk_size": 8,
    "rank": 16,
    "top_k": 1,
    "outliers": 1,
}


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param.name
    return found


def check_refused(harness: Harness, name: str, fields: list[Field] | None, *words: str) -> None:
    """createPlugin gives null in both phases, and logs one error line that names the op and has each word."""
    for phase in Phase:
        assert harness.create(name, fields, phase) is None
        lines = harness.take_log()
        assert len(lines) == 1, lines
        severity, line = lines[0].split(" ", 1)
        assert severity == "1" and "\n" not in line
        for word in (name, *words, "expected"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", line), (word, line)


def test_the_ends_of_all_ranges_are_accepted(harness: Harness, name: str) -> None:
    for values in (MAXIMA, MINIMA):
        for phase in Phase:
            plugin = harness.create(name, attributes(**values), phase)
            assert plugin is not None
            assert plugin.serialized == attributes(**values)


def test_any_order_is_accepted(harness: Harness, name: str) -> None:
    plugin = harness.create(name, attributes()[::-1])
    assert plugin is not None
    assert plugin.serialized == attributes()


OUT_OF_RANGE: list[tuple[str, int, dict[str, int]]] = [
    ("layer", -1, {}),
    ("layer", 1024, {}),
    ("layer", 2**31 - 1, {}),
    ("num_heads", 0, {}),
    ("num_heads", -8, {}),
    ("num_heads", 7, {}),
    ("num_heads", 34, {}),
    ("num_heads", 2**31 - 1, {}),
    ("num_kv_heads", 0, {}),
    ("num_kv_heads", -2, {}),
    ("num_kv_heads", 3, {}),
    ("num_kv_heads", 33, {"num_heads": 33}),
    ("head_size", 0, {}),
    ("head_size", -64, {}),
    ("head_size", 80, {}),
    ("head_size", 256, {}),
    ("chunk_size", 0, {}),
    ("chunk_size", 12, {}),
    ("chunk_size", 32, {}),
    ("rank", 0, {}),
    ("rank", -16, {}),
    ("rank", 24, {}),
    ("rank", 144, {}),
    ("rank", 528, {"num_heads": 32, "num_kv_heads": 32}),
    ("top_k", 0, {}),
    ("top_k", -1, {}),
    ("top_k", 2049, {}),
    ("top_k", 4096, {}),
    ("outliers", 0, {}),
    ("outliers", -1, {}),
    ("outliers", 1025, {}),
]


@pytest.mark.parametrize(("field", "value", "others"), OUT_OF_RANGE)
def test_values_out_of_range(harness: Harness, name: str, field: str, value: int, others: dict[str, int]) -> None:
    check_refused(harness, name, attributes(**{**others, field: value}), field, str(value))
    wide: dict[str, int | Field | None] = {**others, field: int64(field, value)}
    check_refused(harness, name, attributes(**wide), field, str(value))


@pytest.mark.parametrize("field", names.ATTRIBUTES)
@pytest.mark.parametrize("offset", [2**32, -(2**32), 2**62])
def test_values_of_64_bits_are_not_cut_off(harness: Harness, name: str, field: str, offset: int) -> None:
    value = ATTRIBUTES[field] + offset
    check_refused(harness, name, attributes(**{field: int64(field, value)}), field, str(value))


@pytest.mark.parametrize("field", names.ATTRIBUTES)
def test_missing(harness: Harness, name: str, field: str) -> None:
    check_refused(harness, name, attributes(**{field: None}), field, "missing")


def test_none_at_all(harness: Harness, name: str) -> None:
    check_refused(harness, name, [], "missing")
    check_refused(harness, name, None)


@pytest.mark.parametrize("field", ["window", "Layer", "layer ", "layers", "", "plugin_namespace"])
def test_unknown(harness: Harness, name: str, field: str) -> None:
    check_refused(harness, name, [*attributes(), int32(field, 1)], "unknown", f"'{field}'", "outliers")
    check_refused(harness, name, [int32(field, 1), *attributes()], "unknown", f"'{field}'", "outliers")


def test_without_a_name(harness: Harness, name: str) -> None:
    check_refused(harness, name, [*attributes(), Field(None, struct.pack("<i", 1))], "unknown")


@pytest.mark.parametrize("field", names.ATTRIBUTES)
def test_twice(harness: Harness, name: str, field: str) -> None:
    check_refused(harness, name, [*attributes(), int32(field, ATTRIBUTES[field])], field, "twice")


WRONG_TYPES = {
    FieldType.FLOAT16: struct.pack("<e", 8.0),
    FieldType.FLOAT32: struct.pack("<f", 8.0),
    FieldType.FLOAT64: struct.pack("<d", 8.0),
    FieldType.INT8: b"\x08",
    FieldType.INT16: b"\x08\0",
    FieldType.CHAR: b"8\0\0\0",
    FieldType.DIMS: bytes(72),
    FieldType.UNKNOWN: struct.pack("<i", 8),
    FieldType.BF16: b"\0\x41",
}


@pytest.mark.parametrize("field", names.ATTRIBUTES)
@pytest.mark.parametrize("kind", WRONG_TYPES, ids=lambda kind: kind.name)
def test_wrong_types(harness: Harness, name: str, field: str, kind: FieldType) -> None:
    wrong = Field(field, WRONG_TYPES[kind], kind)
    check_refused(harness, name, attributes(**{field: wrong}), field, str(int(kind)), "int32")


@pytest.mark.parametrize("field", names.ATTRIBUTES)
@pytest.mark.parametrize("length", [0, 2, -1])
def test_wrong_lengths(harness: Harness, name: str, field: str, length: int) -> None:
    for make, size in ((int32, 4), (int64, 8)):
        right = make(field, ATTRIBUTES[field])
        assert right.data is not None and len(right.data) == size
        wrong = Field(field, right.data * 2, right.type, length)
        check_refused(harness, name, attributes(**{field: wrong}), field, str(length))


@pytest.mark.parametrize("field", names.ATTRIBUTES)
def test_without_data(harness: Harness, name: str, field: str) -> None:
    check_refused(harness, name, attributes(**{field: Field(field, None)}), field, "no data")


def test_a_refusal_changes_nothing(harness: Harness, name: str) -> None:
    before = harness.create(name, attributes())
    check_refused(harness, name, attributes(rank=24), "rank", "24")
    after = harness.create(name, attributes())
    assert before is not None and after is not None
    assert before.serialized == after.serialized == attributes()
