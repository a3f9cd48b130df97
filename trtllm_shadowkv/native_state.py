"""The part of ``plugins/state/c_api.h`` that is about a state and pinned memory, with Python's types.

:class:`trtllm_shadowkv.runtime.cuda_state.CudaState` is what callers use.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Self

from trtllm_shadowkv.errors import StateError
from trtllm_shadowkv.library import Library, address, load, whole

DRY = -1
"""Device of a dry state, which keeps the books of its rows, has no memory and launches nothing."""

STAGES = ("append", "seal", "score", "select", "fetch", "rebuild", "attend_resident", "attend_fetched", "merge")
"""Kernels of one layer, in the order of ``tsk_stage``."""

_I32, _I64, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def _numbers(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


def structure_values(structure: ctypes.Structure) -> dict[str, Any]:
    """Every field of a structure by its name."""
    return {field[0]: getattr(structure, field[0]) for field in structure._fields_}


class StateConfig(ctypes.Structure):
    """``tsk_state_config``."""

    _fields_ = (
        *_numbers(_I32, "device element landmark_format value_format num_layers num_heads num_kv_heads head_size"),
        *_numbers(_I32, "chunk_size rank top_k outliers window cache_slots slots sealed_rows max_batch live_pages"),
        *_numbers(_I32, "sealed_pages max_tokens row_groups reserved"),
        ("dense_limit", _I64),
        ("inverse_frequencies", ctypes.POINTER(ctypes.c_float)),
    )


class Buffers(ctypes.Structure):
    """``tsk_buffers``: sizes and device addresses of everything a state holds.

    What they mean, and how the arrays are laid out, is in ``plugins/kernels/decode/view.h``.
    """

    _fields_ = (
        *_numbers(_I32, "element landmark_format value_format layers heads kv_heads group head_size chunk_size"),
        *_numbers(_I32, "chunk_shift rank top_k outliers window cache_slots slots sealed_rows max_batch live_pages"),
        *_numbers(_I32, "sealed_pages live_table_stride sealed_table_stride multiprocessors logit_stride"),
        ("scale", ctypes.c_float),
        ("ring", _I32),
        *_numbers(ctypes.c_uint64, "rows live_table sealed_table value_region counters residuals fault live"),
        *_numbers(ctypes.c_uint64, "factor_a landmarks landmark_scales value_scales excluded factor_b centres"),
        *_numbers(ctypes.c_uint64, "outlier_ids outlier_keys outlier_values cache_keys cache_values cache_order"),
        *_numbers(ctypes.c_uint64, "rope_turns rope_steps steps logits logit_sums hit_counts miss_counts entries"),
        *_numbers(ctypes.c_uint64, "partials device_bytes"),
    )


class Row(ctypes.Structure):
    """``tsk_row``."""

    _fields_ = (
        *_numbers(_I32, "length prompt_tokens total_tokens top_k dense loaded sealed must_seal published"),
        *_numbers(_I32, "prompt_chunks live_pages sealed_pages sealed_row value_stride"),
    )


class Statistics(ctypes.Structure):
    """``tsk_statistics``."""

    _fields_ = (
        *_numbers(_I64, "hits misses bytes_fetched sealed_tokens generated_sealed"),
        *_numbers(ctypes.c_double, "residual_lost residual_total"),
    )


@dataclass
class RowInfo:
    """The books on one row.

    Attributes:
        length: tokens, after the last ``begin_pass``.
        prompt_tokens, total_tokens, top_k, dense: as allocated.
        prompt_done: its prompt was read, or it was loaded.
        sealed: it is sealed.
        must_seal: one more token would take it over its dense limit; it takes no step before it is sealed.
        published: sealed chunks that may be selected.
        prompt_chunks: those of them that were sealed together, not one at a time.
        live_pages, sealed_pages: pages it holds.
        sealed_row: its index into what only sealed rows have; −1 where it is never sealed.
        value_stride: chunks from one KV head's values to the next one's.
    """

    length: int
    prompt_tokens: int
    total_tokens: int
    top_k: int
    dense: bool
    prompt_done: bool
    sealed: bool
    must_seal: bool
    published: int
    prompt_chunks: int
    live_pages: int
    sealed_pages: int
    sealed_row: int
    value_stride: int

    @classmethod
    def of(cls, row: Row) -> RowInfo:
        values = structure_values(row)
        values["prompt_done"] = values.pop("loaded")
        for name in ("dense", "prompt_done", "sealed", "must_seal"):
            values[name] = bool(values[name])
        return cls(**values)


# Arguments by name; a leading state or slab is an address like any other.
_STEP = (*_numbers(_I32, "layer"), ("qkv", _ADDRESS), ("positions", _ADDRESS), ("batch", _I32))
_FUNCTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "tsk_stream_create": (("device", _I32), ("stream", _ADDRESS)),
    "tsk_stream_destroy": _numbers(_ADDRESS, "stream"),
    "tsk_pinned_create": (("device", _I32), ("bytes", _I64), ("pinned", _ADDRESS)),
    "tsk_pinned_address": _numbers(_ADDRESS, "pinned device_address host_address"),
    "tsk_pinned_destroy": _numbers(_ADDRESS, "pinned"),
    "tsk_state_create": _numbers(_ADDRESS, "config state"),
    "tsk_state_destroy": _numbers(_ADDRESS, "state"),
    "tsk_state_bind": _numbers(_ADDRESS, "state stream"),
    "tsk_state_unbind": _numbers(_ADDRESS, "state"),
    "tsk_state_describe": _numbers(_ADDRESS, "state buffers"),
    "tsk_state_allocate": (
        ("state", _ADDRESS),
        *_numbers(_I32, "slot prompt_tokens total_tokens top_k dense"),
        ("value_addresses", _ADDRESS),
        ("value_stride", _I32),
        ("stream", _ADDRESS),
    ),
    "tsk_state_load_row": (("state", _ADDRESS), *_numbers(_I32, "slot length"), ("stream", _ADDRESS)),
    "tsk_state_release": (("state", _ADDRESS), ("slot", _I32)),
    "tsk_state_row": (("state", _ADDRESS), ("slot", _I32), ("row", _ADDRESS)),
    "tsk_state_pages": (
        ("state", _ADDRESS),
        *_numbers(_I32, "slot kind"),
        ("ids", _ADDRESS),
        ("capacity", _I32),
        ("count", _ADDRESS),
    ),
    "tsk_state_statistics": (("state", _ADDRESS), ("slot", _I32), *_numbers(_ADDRESS, "statistics stream")),
    "tsk_state_fault": _numbers(_ADDRESS, "state fault stream"),
    "tsk_state_poison": _numbers(_ADDRESS, "state"),
    "tsk_state_begin_context": (("state", _ADDRESS), *_numbers(_I32, "slot start length"), ("stream", _ADDRESS)),
    "tsk_state_seal_prompt": (("state", _ADDRESS), ("slot", _I32), ("stream", _ADDRESS)),
    "tsk_state_begin_generation": (*_numbers(_ADDRESS, "state slots"), ("batch", _I32), ("positions", _ADDRESS)),
    "tsk_step_prologue": (*_numbers(_ADDRESS, "state slots"), ("batch", _I32), ("stream", _ADDRESS)),
    "tsk_landmark_topk": (("state", _ADDRESS), *_STEP, *_numbers(_ADDRESS, "q selection stream")),
    "tsk_key_reconstruct": (("state", _ADDRESS), *_numbers(_I32, "layer batch"), ("stream", _ADDRESS)),
    "tsk_sparse_attention": (
        ("state", _ADDRESS),
        ("layer", _I32),
        ("q", _ADDRESS),
        ("batch", _I32),
        *_numbers(_ADDRESS, "out stream"),
    ),
    "tsk_state_stage": (
        ("state", _ADDRESS),
        *_numbers(_I32, "stage layer begin end batch"),
        *_numbers(_ADDRESS, "qkv positions q selection out stream"),
    ),
}


class NativeApi:
    """Calls functions of the C ABI by name, with numbers checked and failures raised.

    Args:
        library: where they are.

    Raises:
        MissingDependencyError: the library lacks one of them.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._functions = {
            name: library.function(name, ctypes.c_int, *(kind for _, kind in arguments))
            for name, arguments in _FUNCTIONS.items()
        }

    def __call__(self, name: str, *values: Any) -> None:
        """Call ``name`` with whole numbers, addresses (None: null), or what ``ctypes.byref`` gives.

        Raises:
            ConfigError: a number that does not fit, or an argument that the library refuses.
            StateError, MissingDependencyError, ShadowKVError: see :class:`Library`.
        """
        arguments = _FUNCTIONS[name]
        if len(values) != len(arguments):
            raise TypeError(f"{name} takes {len(arguments)} arguments, not {len(values)}")
        checked = [_checked(*argument, value) for argument, value in zip(arguments, values, strict=True)]
        self._library.check(self._functions[name](*checked))


def _checked(name: str, kind: Any, value: Any) -> Any:
    if kind is not _ADDRESS:
        return whole(name, value, 8 * ctypes.sizeof(kind))
    return address(name, value) if value is None or isinstance(value, int) else value


class NativeHandle:
    """Something of the library that must be given back, once.

    Args:
        what: its name in messages.
        destroy: the function that gives it back.
        library: where its functions are; None: the installed one.
    """

    def __init__(self, what: str, destroy: str, library: Library | None) -> None:
        self._what, self._destroy = what, destroy
        self._api = NativeApi(library or load())
        self._handle = ctypes.c_void_p()

    def _open(self) -> int:
        if not self._handle.value:
            raise StateError(f"the {self._what} is closed", f"an open {self._what}")
        return self._handle.value

    def _call(self, name: str, *values: Any) -> None:
        self._api(name, self._open(), *values)

    def close(self) -> None:
        """Give everything back; nothing to do the second time."""
        value, self._handle.value = self._handle.value, None
        if value:
            self._api(self._destroy, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
