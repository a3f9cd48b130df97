"""A state on a GPU: rows, their memory and the ops of a decode step, on raw device addresses and stream handles.

Everything is done by ``libtrtllm_shadowkv.so`` (``plugins/state/c_api.h`` has the contract of each call). A caller with
torch says where tensors are (``tensor.data_ptr()``) and which stream to use (``torch.cuda.Stream().cuda_stream``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from trtllm_shadowkv.config import ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, StateError
from trtllm_shadowkv.library import Library, address, whole
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.native_state import (
    STAGES,
    Buffers,
    NativeHandle,
    Row,
    RowInfo,
    StateConfig,
    Statistics,
    structure_values,
)
from trtllm_shadowkv.runtime.pinned_slab import PinnedSlab
from trtllm_shadowkv.runtime.state import PADDING, PassKind, RowStatistics, check_allocation, check_pass

__all__ = ["CudaState", "PinnedSlab"]

ELEMENTS = ("float16", "bfloat16")
FORMATS = ("element", "e4m3")
STORED = {"auto": "element", "fp8": "e4m3"}
"""Format of a ``value_dtype`` or ``landmark_dtype``."""


class CudaState(NativeHandle):
    """The keys and values of all sequences of one model on one GPU.

    Method names follow :class:`trtllm_shadowkv.runtime.state.State`. ``stream`` is a handle of a stream of the state's
    device, never 0. Addresses of tensors are device addresses; types and shapes are in ``plugins/state/c_api.h``.

    Args:
        model: shape of the model; head size 64, 96 or 128.
        config: settings; the rank may be open.
        dtype: of queries, keys and values: ``float16`` or ``bfloat16``.
        landmark_format, value_format: how landmarks, and values of sealed chunks, are kept: ``element``: as dtype;
            ``e4m3``: with a float32 scale a chunk and head; None: as ``config`` says.
        max_tokens: of one row, up to 2^21.
        slots: rows at a time.
        sealed_rows: those of them that may be sealed; 0 where no row grows beyond the dense limit.
        max_batch: rows of a step, padding included, up to 1,024.
        live_pages: pages of 128 tokens.
        sealed_pages: pages of 512 tokens; 0 as for sealed_rows.
        row_groups: parts in which a step's rows are scored and fetched, up to 8; 0: chosen by the batch size.
        device: the GPU's number; ``native_state.DRY`` for a state that only keeps the books.
        native: the library; None: the installed one.

    Raises:
        ConfigError: a setting out of range, or two that contradict each other.
        MissingDependencyError: no library, driver or GPU.
        ShadowKVError: a CUDA call failed, such as for want of memory; everything was given back.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ShadowKVConfig,
        *,
        dtype: str,
        max_tokens: int,
        slots: int,
        sealed_rows: int,
        max_batch: int,
        live_pages: int,
        sealed_pages: int,
        landmark_format: str | None = None,
        value_format: str | None = None,
        row_groups: int = 0,
        device: int = 0,
        native: Library | None = None,
    ) -> None:
        super().__init__("state", "tsk_state_destroy", native)
        self.model, self.config = model, config.resolved(model.key_width)
        self.device, self.dtype = device, dtype
        self.landmark_format = STORED[config.landmark_dtype] if landmark_format is None else landmark_format
        self.value_format = STORED[config.value_dtype] if value_format is None else value_format
        self._slots: set[int] = set()
        frequencies = model.rope.inverse_frequencies(model.head_size)
        c = self.config
        assert c.rank is not None
        numbers = {
            "device": device,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_size": model.head_size,
            "chunk_size": c.chunk_size,
            "rank": c.rank,
            "top_k": c.top_k,
            "outliers": c.outliers,
            "window": c.window,
            "cache_slots": c.cache_factor * c.top_k,
            "slots": slots,
            "sealed_rows": sealed_rows,
            "max_batch": max_batch,
            "live_pages": live_pages,
            "sealed_pages": sealed_pages,
            "max_tokens": max_tokens,
            "row_groups": row_groups,
        }
        settings = StateConfig(
            element=_index("dtype", dtype, ELEMENTS),
            landmark_format=_index("landmark_format", self.landmark_format, FORMATS),
            value_format=_index("value_format", self.value_format, FORMATS),
            dense_limit=-1 if c.dense else c.dense_limit,
            inverse_frequencies=(ctypes.c_float * len(frequencies))(*frequencies),
            **{name: whole(name, value, 32) for name, value in numbers.items()},
        )
        self._api("tsk_state_create", ctypes.byref(settings), ctypes.byref(self._handle))
        sizes = self.buffers()
        self.slots, self.max_batch, self.cache_slots = sizes["slots"], sizes["max_batch"], sizes["cache_slots"]
        self.live_pages, self.sealed_pages = sizes["live_pages"], sizes["sealed_pages"]
        self.sealed_rows, self.device_bytes = sizes["sealed_rows"], sizes["device_bytes"]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def allocate(
        self,
        slot: int,
        *,
        prompt_tokens: int,
        total_tokens: int,
        top_k: int,
        dense: bool,
        stream: int,
        value_addresses: Sequence[int] | None = None,
        value_stride: int = 0,
    ) -> None:
        """Give a slot to a sequence, and reserve all pages that it will ever need.

        Args:
            prompt_tokens, total_tokens, top_k, dense: see ``State.allocate``.
            value_addresses: device address of each layer's values, room for num_kv_heads · value_stride chunks; None
                where the row is never sealed.
            value_stride: chunks from one KV head's values to the next one's, at least
                ``config.sealed_chunks(total_tokens + 1)``.

        Raises:
            StateError: the slot is in use, or the state's capacity does not suffice; nothing was taken.
            ConfigError: a number out of range.
        """
        whole("slot", slot, 32)
        check_allocation(self._rows([slot]), slot, top_k, self.config)
        values = None
        if value_addresses is not None:
            if len(value_addresses) != self.model.num_layers:
                raise ConfigError(f"{len(value_addresses)} value addresses", f"{self.model.num_layers}, one a layer")
            values = (ctypes.c_uint64 * len(value_addresses))(
                *(address("a value address", a) or 0 for a in value_addresses)
            )
        numbers = (slot, prompt_tokens, total_tokens, top_k, int(dense))
        self._call("tsk_state_allocate", *numbers, values, value_stride, stream)
        self._slots.add(slot)

    def load_row(self, slot: int, length: int, stream: int) -> None:
        """Declare the row's first ``length`` tokens, and its sealed state where it has one by then, to be in place.

        Raises:
            StateError: nothing is allocated there, or the row is sealed.
            ConfigError: more tokens than the row may hold unsealed.
        """
        self._call("tsk_state_load_row", slot, length, stream)

    def release(self, slot: int) -> None:
        """Take back everything a slot holds; nothing to do where it holds nothing."""
        self._call("tsk_state_release", slot)
        self._slots.discard(slot)

    def row(self, slot: int) -> RowInfo:
        """The books on a row.

        Raises:
            StateError: nothing is allocated there.
        """
        row = Row()
        self._call("tsk_state_row", slot, ctypes.byref(row))
        return RowInfo.of(row)

    def live_pages_of(self, slot: int) -> list[int]:
        """Ids of a row's n live pages; token p is in number p // 128 % n."""
        return self._pages(slot, 0)

    def sealed_pages_of(self, slot: int) -> list[int]:
        """Ids of a row's sealed pages; chunk c is in number c · chunk_size // 512."""
        return self._pages(slot, 1)

    def sealed_row_of(self, slot: int) -> int:
        """A row's index into what only sealed rows have; −1 where it is never sealed."""
        return self.row(slot).sealed_row

    def _pages(self, slot: int, kind: int) -> list[int]:
        count = ctypes.c_int32()
        self._call("tsk_state_pages", slot, kind, None, 0, ctypes.byref(count))
        ids = (ctypes.c_int32 * count.value)()
        self._call("tsk_state_pages", slot, kind, ids, count.value, ctypes.byref(count))
        return list(ids)

    def length(self, slot: int) -> int:
        """Tokens stored for this row."""
        return self.row(slot).length

    def is_sealed(self, slot: int) -> bool:
        return self.row(slot).sealed

    def must_seal(self, slot: int) -> bool:
        """True where the next token would take a row that is not sealed over its dense limit."""
        return self.row(slot).must_seal

    def statistics(self, slot: int, stream: int) -> RowStatistics:
        """Counters of one row; waits for the stream."""
        found = Statistics()
        self._call("tsk_state_statistics", slot, ctypes.byref(found), stream)
        return RowStatistics(**structure_values(found))

    def fault(self, stream: int) -> int:
        """Read and clear what kernels found wrong: 1 positions, 2 slots, 0 nothing; waits for the stream."""
        bits = ctypes.c_uint32()
        self._call("tsk_state_fault", ctypes.byref(bits), stream)
        return bits.value

    def buffers(self) -> dict[str, int]:
        """Sizes and device addresses of everything the state holds, by the names of ``native_state.Buffers``."""
        found = Buffers()
        self._call("tsk_state_describe", ctypes.byref(found))
        return {name: value for name, value in structure_values(found).items() if name != "scale"}

    def poison(self) -> None:
        """For tests: fill the pools, unless a slot is in use, and a layer's scratch memory with bytes 0xff; waits."""
        self._call("tsk_state_poison")

    def seal_prompt(self, slot: int, stream: int) -> None:
        """Seal every chunk that is outside the window at the row's next token, and give back its other live pages.

        Keys that are not finite set bit 4 of :meth:`fault`, and the row is of no use.

        Raises:
            StateError: its prompt is not done, or it need not be sealed; nothing was done.
        """
        self._call("tsk_state_seal_prompt", slot, stream)

    # --- engines ------------------------------------------------------------------------------------------------------

    def bind(self, stream: int) -> None:
        """From now on plugins of an engine that runs on ``stream`` work on this state, until it is unbound or closed.

        Raises:
            ConfigError: one of CUDA's default streams.
            StateError: this state has a stream, or the stream another state.
        """
        self._call("tsk_state_bind", stream)

    def unbind(self) -> None:
        """Nothing to do where it is not bound; waits for plugins that are being enqueued."""
        self._call("tsk_state_unbind")

    # --- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(
        self, kind: PassKind, slots: Sequence[int], start: int, length: int, is_last: bool, stream: int | None = None
    ) -> None:
        """Announce a pass.

        Args:
            kind, slots, start, length, is_last: see ``State.begin_pass``.
            stream: of the pass (context only).

        Raises:
            StateError: rows that cannot take this pass; no row has advanced.
            ConfigError: a slot that there is not, or twice.
        """
        if kind == "generation":
            self.begin_generation(slots)
            return
        check_pass(self._rows(slots), self.must_seal, kind, slots, start, length)
        row = self.row(slots[0])
        if is_last != (start + length == row.prompt_tokens):
            end = "ends" if is_last else "does not end"
            raise StateError(
                f"a stretch to token {start + length} that {end} the prompt", f"a prompt of {row.prompt_tokens}"
            )
        self._call("tsk_state_begin_context", slots[0], start, length, stream)

    def begin_generation(self, slots: Sequence[int]) -> list[int]:
        """Announce a generation pass, also before each replay of a captured graph.

        Returns:
            the position of each row's token, 0 of a padding row.

        Raises:
            StateError, ConfigError: as :meth:`begin_pass`.
        """
        batch = [whole("slot", s, 32) for s in slots]
        positions = (ctypes.c_int32 * len(batch))()
        self._call("tsk_state_begin_generation", (ctypes.c_int32 * len(batch))(*batch), len(batch), positions)
        return list(positions)

    def step_prologue(self, slots: int, batch: int, stream: int) -> None:
        """Advance every row; ``slots`` is the address of int32 [batch], the same as announced."""
        self._call("tsk_step_prologue", slots, batch, stream)

    def landmark_topk(
        self, layer: int, qkv: int, positions: int, batch: int, q: int, selection: int | None, stream: int
    ) -> None:
        """RoPE and append; in a generation pass also seal, scores, selection, and the start of the fetch.

        Writes ``q`` and ``selection``. ``batch``: rows, or in a context pass the tokens of the stretch.
        """
        self._call("tsk_landmark_topk", layer, qkv, positions, batch, q, selection, stream)

    def key_reconstruct(self, layer: int, batch: int, stream: int) -> None:
        """Keys of the selected chunks that are not in the chunk cache."""
        self._call("tsk_key_reconstruct", layer, batch, stream)

    def sparse_attention(self, layer: int, q: int, batch: int, out: int, stream: int) -> None:
        """Attention over outliers, selected chunks and live tokens, in a context pass causally; writes ``out``."""
        self._call("tsk_sparse_attention", layer, q, batch, out, stream)

    def stage(
        self,
        name: str,
        layer: int,
        begin: int,
        end: int,
        batch: int,
        *,
        stream: int,
        qkv: int | None = None,
        positions: int | None = None,
        q: int | None = None,
        selection: int | None = None,
        out: int | None = None,
    ) -> None:
        """For tests and benches: one kernel of ``native_state.STAGES`` by itself, for batch rows [begin, end).

        Addresses that the kernel has no use for may be None.
        """
        numbers = (_index("stage", name, STAGES), layer, begin, end, batch)
        self._call("tsk_state_stage", *numbers, qkv, positions, q, selection, out, stream)

    def _rows(self, slots: Sequence[int]) -> dict[int, RowInfo]:
        """Those of ``slots`` that are allocated."""
        return {s: self.row(s) for s in slots if s != PADDING and s in self._slots}


def _index(name: str, value: str, known: Sequence[str]) -> int:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}", f"one of {', '.join(known)}")
    return known.index(value)
