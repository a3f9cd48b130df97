"""What TensorRT asks of the three plugins while it builds an engine, and before the first pass of one: no GPU.

How their attributes are checked is in test_attributes.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.plugins.tensorrt.harness import Harness, Plugin
from tests.plugins.tensorrt.kinds import FORMATS, LINEAR, FieldType, Logger, Phase, Tensor, Type
from tests.plugins.tensorrt.ops import (
    ATTRIBUTES,
    ELEMENTS,
    KEY_RECONSTRUCT,
    LANDMARK_TOPK,
    OPS,
    SPARSE_ATTENTION,
    Op,
    attributes,
    int64,
    is_element,
    tensor,
)
from trtllm_shadowkv import names

UNBOUND_STREAMS = (0x5EED_0000, 1, 2, 0)
"""Nothing was bound to these; 0 to 2 are CUDA's names for streams that every process has."""


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def op(request: pytest.FixtureRequest) -> Op:
    found: Op = request.param
    return found


@pytest.fixture(params=Phase, ids=lambda phase: phase.name.lower())
def phase(request: pytest.FixtureRequest) -> Phase:
    found: Phase = request.param
    return found


def make(harness: Harness, op: Op, phase: Phase = Phase.BUILD) -> Plugin:
    plugin = harness.create(op.name, attributes(), phase)
    assert plugin is not None, harness.take_log()
    return plugin


def only_line(harness: Harness, op: Op, *words: str) -> None:
    """One line was logged, as an error, that names the op, its layer and all ``words``."""
    lines = harness.take_log()
    assert len(lines) == 1, lines
    severity, line = lines[0].split(" ", 1)
    assert severity == "1" and "\n" not in line
    for word in (op.name, f"layer {ATTRIBUTES['layer']}", *words):
        assert word in line, (word, line)


# --- creators and plugins as objects ---------------------------------------------------------------------------------


def test_creators_name_the_ops_and_their_attributes(harness: Harness) -> None:
    found = harness.creators()
    assert sorted(c.name for c in found) == sorted(op.name for op in OPS)
    for creator in found:
        assert creator.interface == ("PLUGIN CREATOR_V3ONE", 1)
        assert (creator.version, creator.namespace) == (names.PLUGIN_VERSION, names.DOMAIN)
        assert tuple(f.name for f in creator.fields) == names.ATTRIBUTES
        assert {(f.type, f.length) for f in creator.fields} == {(FieldType.INT32, 1)}


def test_a_plugin_has_core_build_and_runtime(harness: Harness, op: Op) -> None:
    plugin = make(harness, op)
    # Version 1 of the build interface: no output shares the memory of an input.
    expected = ["PLUGIN|1", "PLUGIN_V3ONE_CORE|1", "PLUGIN_V3ONE_BUILD|1", "PLUGIN_V3ONE_RUNTIME|1", "none"]
    assert plugin.capabilities == expected
    assert plugin.core == (op.name, names.PLUGIN_VERSION, names.DOMAIN)


def test_a_runtime_plugin_has_core_and_runtime(harness: Harness, op: Op) -> None:
    _, core, _, runtime, _ = make(harness, op, Phase.RUNTIME).capabilities
    assert (core, runtime) == ("PLUGIN_V3ONE_CORE|1", "PLUGIN_V3ONE_RUNTIME|1")


def test_what_an_engine_keeps_makes_the_same_plugin(harness: Harness, op: Op, phase: Phase) -> None:
    plugin = make(harness, op, phase)
    kept = plugin.serialized
    assert kept == attributes()
    loaded = harness.create(op.name, kept, Phase.RUNTIME)
    assert loaded is not None
    assert loaded.serialized == kept and loaded.core == plugin.core


def test_attributes_of_64_bits_are_kept_as_32(harness: Harness, op: Op) -> None:
    plugin = harness.create(op.name, [int64(name, value) for name, value in ATTRIBUTES.items()])
    assert plugin is not None
    assert plugin.serialized == attributes()


@pytest.mark.parametrize("how", ["clone", "attach"])
def test_copies_outlive_their_original(harness: Harness, op: Op, phase: Phase, how: str) -> None:
    plugin = make(harness, op, phase)
    capabilities = plugin.capabilities
    copy = plugin.clone() if how == "clone" else plugin.attach()
    del plugin
    assert copy.serialized == attributes()
    assert copy.core == (op.name, names.PLUGIN_VERSION, names.DOMAIN)
    assert copy.capabilities == capabilities
    # A copy is of its original's phase: without a state one does nothing, the other fails.
    failed = copy.enqueue(op.run(4, 4), UNBOUND_STREAMS[0]) != 0
    assert failed == (phase is Phase.RUNTIME)
    assert len(harness.take_log()) == failed


def test_there_are_no_tactics_and_no_workspace(harness: Harness, op: Op) -> None:
    plugin = make(harness, op)
    assert plugin.tactics == 0
    assert plugin.set_tactic() == 0
    assert plugin.workspace(op.build()) == 0
    assert plugin.workspace(op.run(4096, 1)) == 0


# --- types, formats and sizes ----------------------------------------------------------------------------------------


def types(op: Op, which: tuple[str, ...], element: Type) -> list[Type]:
    return [element if is_element(name) else Type.INT32 for name in which]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda t: t.name)
def test_outputs_are_of_the_type_of_the_input(harness: Harness, op: Op, element: Type) -> None:
    plugin = make(harness, op)
    assert plugin.output_count == len(op.outputs)
    assert plugin.output_types(types(op, op.inputs, element)) == types(op, op.outputs, element)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda t: t.name)
def test_each_tensor_has_one_format_and_its_type(harness: Harness, op: Op, element: Type) -> None:
    plugin = make(harness, op)
    right = op.build(element)
    for position, name in enumerate(op.tensors):
        # What comes after the position is not decided yet, and may be anything.
        later = [replace(t, type=Type.INT4, format=5) for t in right[position + 1 :]]
        for kind in Type:
            for form in FORMATS:
                asked = replace(right[position], type=kind, format=form)
                # The first tensor decides the type of the others.
                wanted = ELEMENTS if is_element(name) and position == 0 else (right[position].type,)
                expected = kind in wanted and form == LINEAR
                given = [*right[:position], asked, *later]
                assert plugin.supports(position, given) == expected, (name, kind, form)


def test_float32_is_refused_everywhere(harness: Harness) -> None:
    for op in (LANDMARK_TOPK, SPARSE_ATTENTION):
        plugin = make(harness, op)
        for position, name in enumerate(op.tensors):
            if is_element(name):
                assert not plugin.supports(position, op.build(Type.FLOAT))


def test_shapes_with_symbols(harness: Harness) -> None:
    assert make(harness, LANDMARK_TOPK).output_shapes("N,768;N;B") == "N,512;B,2,16"
    assert make(harness, KEY_RECONSTRUCT).output_shapes("B,2,16;B") == "1"
    assert make(harness, SPARSE_ATTENTION).output_shapes("N,512;B,2,16;1;B") == "N,512"


def test_shapes_with_numbers(harness: Harness) -> None:
    assert make(harness, LANDMARK_TOPK).output_shapes("4096,768;4096;1") == "4096,512;1,2,16"
    assert make(harness, KEY_RECONSTRUCT).output_shapes("1,2,16;1") == "1"
    assert make(harness, SPARSE_ATTENTION).output_shapes("7,512;7,2,16;1;7") == "7,512"


def test_widths_may_be_unknown_too(harness: Harness) -> None:
    assert make(harness, LANDMARK_TOPK).output_shapes("N,W;P;B") == "N,512;B,2,16"
    assert make(harness, KEY_RECONSTRUCT).output_shapes("B,H,K;R") == "1"
    assert make(harness, SPARSE_ATTENTION).output_shapes("N,W;B,H,K;T;R") == "N,512"


WRONG_SHAPES = [
    (LANDMARK_TOPK, "qkv", "N,767", "[tokens, 768]"),
    (LANDMARK_TOPK, "qkv", "N,512", "[tokens, 768]"),
    (LANDMARK_TOPK, "qkv", "1,N,768", "[tokens, 768]"),
    (LANDMARK_TOPK, "qkv", "N", "[tokens, 768]"),
    (LANDMARK_TOPK, "position_ids", "1,N", "[tokens]"),
    (LANDMARK_TOPK, "sequence_slots", "B,1", "[rows]"),
    (KEY_RECONSTRUCT, "selection", "B,3,16", "[rows, 2, 16]"),
    (KEY_RECONSTRUCT, "selection", "B,2,15", "[rows, 2, 16]"),
    (KEY_RECONSTRUCT, "selection", "B,32", "[rows, 2, 16]"),
    (KEY_RECONSTRUCT, "sequence_slots", "B,1", "[rows]"),
    (SPARSE_ATTENTION, "q", "N,768", "[tokens, 512]"),
    (SPARSE_ATTENTION, "q", "1,N,512", "[tokens, 512]"),
    (SPARSE_ATTENTION, "selection", "B,1,16", "[rows, 2, 16]"),
    (SPARSE_ATTENTION, "ticket", "2", "[1]"),
    (SPARSE_ATTENTION, "ticket", "1,1", "[1]"),
    (SPARSE_ATTENTION, "sequence_slots", "B,1", "[rows]"),
]


@pytest.mark.parametrize(
    ("op", "name", "shape", "expected"), WRONG_SHAPES, ids=[f"{o.name}-{n}-{s}" for o, n, s, _ in WRONG_SHAPES]
)
def test_wrong_shapes_are_refused(harness: Harness, op: Op, name: str, shape: str, expected: str) -> None:
    plugin = make(harness, op)
    assert plugin.output_shapes(op.shapes(**{name: shape})) is None
    only_line(harness, op, f"{name} is ", f"expected {expected}", shape.split(",")[-1].strip("NB"))

    sizes = tuple(int(s) if s.isdigit() else -1 for s in shape.split(","))
    wrong = {name: replace(tensor(name, Type.HALF, -1, -1), sizes=sizes)}
    assert plugin.configure(op.build(changed=wrong)) != 0
    only_line(harness, op, f"{name} is ", f"expected {expected}")

    wrong = {name: replace(wrong[name], sizes=tuple(s if s > 0 else 4 for s in sizes))}
    assert plugin.on_shape_change(op.run(4, 4, changed=wrong)) != 0
    only_line(harness, op, f"{name} is ", f"expected {expected}")


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda t: t.name)
def test_configures_for_unknown_and_known_sizes(harness: Harness, op: Op, element: Type) -> None:
    plugin = make(harness, op)
    assert plugin.configure(op.build(element)) == 0
    assert plugin.configure(op.run(64, 64, element)) == 0
    assert plugin.configure(op.run(4096, 1, element)) == 0
    assert plugin.clone().configure(op.build(element)) == 0


WRONG_OUTPUTS = [
    (LANDMARK_TOPK, "q", (-1, 768)),
    (LANDMARK_TOPK, "selection", (-1, 2, 15)),
    (KEY_RECONSTRUCT, "ticket", (2,)),
    (SPARSE_ATTENTION, "out", (-1, 64)),
]


@pytest.mark.parametrize(("op", "name", "sizes"), WRONG_OUTPUTS, ids=lambda v: getattr(v, "name", str(v)))
def test_wrong_outputs_are_refused(harness: Harness, op: Op, name: str, sizes: tuple[int, ...]) -> None:
    plugin = make(harness, op)
    assert plugin.configure(op.build(changed={name: replace(tensor(name, Type.HALF, -1, -1), sizes=sizes)})) != 0
    only_line(harness, op, f"{name} is ", "expected")


def test_another_number_of_tensors_is_refused(harness: Harness, op: Op) -> None:
    plugin = make(harness, op)
    count = len(op.inputs)
    for inputs in (op.inputs[:-1], (*op.inputs, "position_ids")):
        found = str(len(inputs))
        assert plugin.output_types(types(op, inputs, Type.HALF)) is None
        only_line(harness, op, found, f"expected {count}")
        assert plugin.output_shapes(replace(op, inputs=inputs).shapes()) is None
        only_line(harness, op, found, f"expected {count}")
        given = replace(op, inputs=inputs).build()
        assert plugin.configure(given) != 0
        only_line(harness, op, found, f"expected {count}")
        assert plugin.on_shape_change(given) != 0
        only_line(harness, op, found, f"expected {count}")
        assert not any(plugin.supports(position, given) for position in range(len(given)))


# --- passes ----------------------------------------------------------------------------------------------------------

PASSES = [(1, 1), (7, 7), (4096, 1), (2, 2), (1024, 1024)]
"""Tokens and rows: generation passes have one token a row, context passes one row."""


@pytest.mark.parametrize(("tokens", "rows"), PASSES)
def test_shapes_of_a_pass_are_accepted(harness: Harness, op: Op, phase: Phase, tokens: int, rows: int) -> None:
    plugin = make(harness, op, phase)
    for element in ELEMENTS:
        assert plugin.on_shape_change(op.run(tokens, rows, element)) == 0
    assert plugin.attach().on_shape_change(op.run(tokens, rows)) == 0


def of(name: str, tokens: int, rows: int) -> dict[str, Tensor]:
    return {name: tensor(name, Type.HALF, tokens, rows)}


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        (LANDMARK_TOPK, "qkv", "position_ids"),
        (KEY_RECONSTRUCT, "selection", "sequence_slots"),
        (SPARSE_ATTENTION, "selection", "sequence_slots"),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
@pytest.mark.parametrize("sizes", [(4, 3), (4, 5), (4, 0), (0, 4)])
def test_inputs_of_different_passes_are_refused(
    harness: Harness, op: Op, phase: Phase, first: str, second: str, sizes: tuple[int, int]
) -> None:
    plugin = make(harness, op, phase)
    changed = {**of(first, sizes[0], sizes[0]), **of(second, sizes[1], sizes[1])}
    assert plugin.on_shape_change(op.run(4, 4, changed=changed)) != 0
    only_line(harness, op, second, f"has {sizes[1]}", f"expected {sizes[0]}")


@pytest.mark.parametrize(("tokens", "rows"), PASSES)
def test_nothing_is_launched_while_an_engine_is_built(harness: Harness, op: Op, tokens: int, rows: int) -> None:
    # A launch on a machine without a GPU fails, and all memory is null: success means that nothing was done.
    plugin = make(harness, op)
    for which in (plugin, plugin.clone(), plugin.attach()):
        for stream in UNBOUND_STREAMS:
            assert which.on_shape_change(op.run(tokens, rows)) == 0
            assert which.enqueue(op.run(tokens, rows), stream) == 0


@pytest.mark.parametrize("stream", UNBOUND_STREAMS)
def test_a_pass_without_a_state_fails(harness: Harness, op: Op, stream: int) -> None:
    plugin = make(harness, op, Phase.RUNTIME)
    for which in (plugin, plugin.clone(), plugin.attach()):
        assert which.enqueue(op.run(4, 4), stream) != 0
        only_line(harness, op, "no state is bound to this stream", "expected")


# --- the log ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logger", [Logger.FINDS_NONE, Logger.NO_FINDER])
def test_without_a_logger_lines_go_to_standard_error(
    harness: Harness, op: Op, logger: Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.set_logger(logger)
    assert harness.create(op.name, attributes(head_size=80)) is None
    assert make(harness, op, Phase.RUNTIME).enqueue(op.run(4, 4), UNBOUND_STREAMS[0]) != 0
    out, err = capfd.readouterr()
    assert out == ""
    assert re.findall("head_size is 80|no state is bound", err) == ["head_size is 80", "no state is bound"]
    assert err.count("\n") == 2 and err.endswith("\n")
