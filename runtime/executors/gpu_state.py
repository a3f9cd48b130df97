"""The state of the TensorRT executor: a CUDA state on one stream, and pinned memory for its rows' values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_shadowkv.config import PAGE_TOKENS, ShadowKVConfig
from trtllm_shadowkv.errors import ConfigError, GenerationError, StateError
from trtllm_shadowkv.footprint import SEALED_PAGE_TOKENS, window_pages
from trtllm_shadowkv.models import ModelConfig
from trtllm_shadowkv.runtime.cuda_state import CudaState
from trtllm_shadowkv.runtime.state import Footprint, PassKind, RowStatistics
from trtllm_shadowkv.runtime.value_pool import PinnedValuePool, aligned

_FAULT_KEYS = 4  # kernels::kFAULT_KEYS
_MAX_PAGES = 1 << 20  # of a state, of either kind


@dataclass(frozen=True)
class RowPages:
    """What a row takes of each pool.

    Attributes:
        live: live pages until it is sealed.
        kept: live pages once it is.
        sealed: sealed pages.
        chunks: room for sealed chunks of a KV head in its values; 0 where it is never sealed.
    """

    live: int
    kept: int
    sealed: int
    chunks: int

    @classmethod
    def of(cls, config: ShadowKVConfig, prompt_tokens: int, total_tokens: int, dense: bool) -> RowPages:
        """As ``plugins/state/row_book.cpp`` reserves them."""
        if dense or total_tokens <= config.limit:
            return cls(-(-total_tokens // PAGE_TOKENS), 0, 0, 0)
        kept = window_pages(config.window)
        live = -(-int(max(prompt_tokens, min(total_tokens, config.limit))) // PAGE_TOKENS)
        chunks = config.sealed_chunks(total_tokens + 1)
        return cls(max(live, kept), kept, -(-chunks * config.chunk_size // SEALED_PAGE_TOKENS), chunks)


@dataclass(frozen=True)
class Capacity:
    """How a state's device memory is divided.

    Attributes:
        live_pages, sealed_pages, sealed_rows: as :class:`CudaState` takes them.
        live_bytes, sealed_bytes: of one page, with what comes with it.
        device_bytes: what the state may take.
    """

    live_pages: int
    sealed_pages: int
    sealed_rows: int
    live_bytes: int
    sealed_bytes: int
    device_bytes: int

    @classmethod
    def within(
        cls, device_bytes: int, slots: int, max_tokens: int, config: ShadowKVConfig, size_of: Callable[..., int]
    ) -> Capacity:
        """Room for one longest prompt being read, for every row's window, and for as many sealed tokens as possible.

        No more than all slots could use is taken.

        Args:
            device_bytes: all that the state may take.
            size_of: bytes of a state with these ``live_pages``, ``sealed_pages`` and ``sealed_rows``.

        Raises:
            ConfigError: not even one longest row fits.
        """
        longest = RowPages.of(config, max_tokens, max_tokens, dense=False)
        rows = slots if longest.chunks else 0

        def size(live: int, sealed: int) -> int:
            return size_of(live_pages=live, sealed_pages=sealed, sealed_rows=rows)

        def fits(live: int, sealed: int) -> bool:
            return size(live, sealed) <= device_bytes

        live, sealed = longest.live + longest.kept * (slots - 1), longest.sealed
        if not fits(live, sealed):
            raise ConfigError(
                f"there are {device_bytes:,} bytes of device memory for keys and sealed state",
                f"at least {size(live, sealed):,}, for one row of {max_tokens:,} tokens among {slots} rows",
                "lower max_batch_size or max_seq_len, or raise device_memory where it was set",
            )
        # Short rows stay dense: room for one in every slot, where there is.
        short = RowPages.of(config, 1, int(min(max_tokens, config.limit)), dense=False).live * slots
        short = min(short, _MAX_PAGES)
        if fits(max(live, short), sealed):
            live = max(live, short)
        most_live, most_sealed = -(-max_tokens // PAGE_TOKENS) * slots, longest.sealed * slots
        sealed = _largest(sealed, min(most_sealed, _MAX_PAGES), lambda pages: fits(live, pages))
        live = _largest(live, max(live, min(most_live, _MAX_PAGES)), lambda pages: fits(pages, sealed))
        live_bytes = (size(live, sealed) - size(1, sealed)) // max(live - 1, 1)
        sealed_bytes = (size(live, sealed) - size(live, min(1, rows))) // max(sealed - 1, 1)
        return cls(live, sealed, rows, max(live_bytes, 1), max(sealed_bytes, 1), device_bytes)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from ``low``, which fits, to ``high`` that does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def wrong_inputs(fault: int) -> StateError:
    """What kernels found wrong that no caller can have caused."""
    return StateError(f"kernels found wrong inputs (fault bits {fault})", "0", "report this as a bug")


class GpuState:
    """:class:`trtllm_shadowkv.runtime.state.Rows` for engines, whose plugins call the CUDA state themselves.

    Args:
        cuda: the state; given back by :meth:`close`, as is ``values``.
        values: pinned memory for sealed rows; None where no row is ever sealed.
        capacity: what ``cuda`` was made with.
        stream: handle of the stream that every pass runs on; the state is bound to it.
    """

    def __init__(self, cuda: CudaState, values: PinnedValuePool | None, capacity: Capacity, stream: int) -> None:
        self.cuda, self.values, self.capacity, self.stream = cuda, values, capacity, stream
        self.model: ModelConfig = cuda.model
        self.config: ShadowKVConfig = cuda.config
        self._addresses: dict[int, list[int]] = {}
        self._unsealed: set[int] = set()  # slots of rows that will be sealed
        cuda.bind(stream)

    @staticmethod
    def region_of(model: ModelConfig, config: ShadowKVConfig, value_format: str, chunks: int) -> int:
        """Bytes of one layer's values of a row with room for ``chunks`` sealed chunks."""
        element = 1 if value_format == "e4m3" else 2
        return aligned(model.key_width * config.chunk_size * chunks * element)

    def region_bytes(self, chunks: int) -> int:
        return self.region_of(self.model, self.config, self.cuda.value_format, chunks)

    def footprint(self, prompt_tokens: int, total_tokens: int, dense: bool) -> Footprint:
        """Bytes a sequence will need: what admission reserves."""
        pages = RowPages.of(self.config, prompt_tokens, total_tokens, dense)
        live, sealed = self.capacity.live_bytes, self.capacity.sealed_bytes
        host = 0
        if pages.chunks and self.values is not None:
            host = self.model.num_layers * self.values.share(self.region_bytes(pages.chunks))
        return Footprint(pages.live * live, pages.sealed * sealed, host, pages.kept * live)

    def allocate(self, slot: int, *, prompt_tokens: int, total_tokens: int, top_k: int, dense: bool) -> None:
        pages = RowPages.of(self.config, prompt_tokens, total_tokens, dense)
        row: dict[str, Any] = {}
        if pages.chunks:
            assert self.values is not None
            addresses = self.values.take(self.region_bytes(pages.chunks), self.model.num_layers)
            row = {"value_addresses": addresses, "value_stride": pages.chunks}
        try:
            self.cuda.allocate(
                slot,
                prompt_tokens=prompt_tokens,
                total_tokens=total_tokens,
                top_k=top_k,
                dense=dense,
                stream=self.stream,
                **row,
            )
        except BaseException:
            if self.values is not None:
                self.values.give(row.get("value_addresses", ()))
            raise
        self._addresses[slot] = row.get("value_addresses", [])
        if pages.chunks:
            self._unsealed.add(slot)

    def release(self, slot: int) -> None:
        """Take back everything a slot holds; no pass with it may still be running."""
        self._unsealed.discard(slot)
        try:
            self.cuda.release(slot)
        finally:
            addresses = self._addresses.pop(slot, [])
            if self.values is not None:
                self.values.give(addresses)

    def length(self, slot: int) -> int:
        return self.cuda.length(slot)

    def is_sealed(self, slot: int) -> bool:
        return self.cuda.is_sealed(slot)

    def must_seal(self, slot: int) -> bool:
        return slot in self._unsealed and self.cuda.must_seal(slot)

    def seal_prompt(self, slot: int) -> None:
        """Waits until it is done.

        Raises:
            GenerationError: keys that are not finite; the row is of no use.
        """
        self._unsealed.discard(slot)
        self.cuda.seal_prompt(slot, self.stream)
        fault = self.cuda.fault(self.stream)
        if fault & _FAULT_KEYS:
            raise GenerationError("the model gave keys that are not finite for this prompt")
        if fault:
            raise wrong_inputs(fault)

    def statistics(self, slot: int) -> RowStatistics:
        """Waits for the stream."""
        return self.cuda.statistics(slot, self.stream)

    def begin_pass(self, kind: PassKind, slots: Sequence[int], start: int, length: int, is_last: bool) -> None:
        self.cuda.begin_pass(kind, slots, start, length, is_last, stream=self.stream)

    def close(self) -> None:
        """Wait for the device and give everything back; nothing to do the second time."""
        try:
            self.cuda.close()
        finally:
            if self.values is not None:
                self.values.close()
