"""What sequences remember on a device: memory for as many as run at a time, at places that do not move.

A recurrent state lies on the host until its sequence runs, and snapshots of it do for good: they are many, and seldom
used. Keys and values stay on the device, since snapshots share their pages.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mosaic.format.spec import GatedDeltaSpec, Mixer, ModelSpec
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.footprint import held_pages, row_width
from mosaic.runtime.kv import KVCache, KVFormat, KVPool, Page, page_tensors, pages_of
from mosaic.runtime.state import DeltaState, LayerState

KEYS_AND_VALUES, TABLES, STATES = "keys and values", "page tables", "recurrent states"  # the plan's names

Thing = TypeVar("Thing")


class Places(Generic[Thing]):
    """Lends things; what is lent is free again when its borrower is gone."""

    def __init__(self, things: Sequence[Thing]) -> None:
        self._things = things
        self._borrowers: list[Callable[[], object | None]] = [_nobody] * len(things)

    def lend(self, borrower: object) -> Thing:
        """One that nobody has. MemoryError if there is none."""
        for number, held in enumerate(self._borrowers):
            if held() is None:
                self._borrowers[number] = weakref.ref(borrower)
                return self._things[number]
        raise MemoryError("more sequences at a time than the device has memory for")


def _nobody() -> None:
    """Nobody has had this one yet."""


class DevicePool(KVPool):
    """Pages in one piece of memory: `values` [P, *page_shape], `scales` [P, *page_shape[:-1], 1] or [P, 0].

    `sequences`: how many run at a time, each of at most `context` tokens. A sequence that runs has a page table in
    every one of so many `layers`.
    """

    def __init__(
        self, spec: ModelSpec, kv: KVFormat, memory: Memory, *, layers: int, sequences: int, context: int
    ) -> None:
        super().__init__(spec.attention.num_kv_heads, spec.attention.head_dim, kv)
        pages = layers * held_pages(context, sequences)
        self.values, self.scales = page_tensors(
            kv, pages, self.page_shape, lambda *shape_dtype: memory.empty(KEYS_AND_VALUES, *shape_dtype)
        )
        self._own(self.values, self.scales)
        widths = pages_of(context), 1
        tables, counts = (
            memory.empty(TABLES, (layers * sequences, row_width(width)), torch.int32)[:, :width] for width in widths
        )
        self.tables = Places(list(zip(tables, counts, strict=True)))

    def cache(self, pages: Sequence[Page] = (), length: int = 0) -> KVCache:
        """See KVPool."""
        return DeviceCache(self, pages, length)

    def _slab(self) -> None:
        raise MemoryError("the device has no more memory for keys and values")


class DeviceCache(KVCache):
    """A KVCache that runs on a device has there, at addresses of its own: `table` int32 [pages], `count` int32 [1].

    The table numbers its pages; the count is of the tokens that were attended to.
    """

    pool: DevicePool
    table: Tensor
    count: Tensor

    def reserve(self, tokens: int) -> None:
        """See KVCache."""
        if not hasattr(self, "table"):
            self.table, self.count = self.pool.tables.lend(self)
            self.count.fill_(self.length)
            self._listed = 0
        super().reserve(tokens)
        while self._listed < len(self.pages):
            self._list_run()

    def positions(self, tokens: int) -> Tensor:
        """See KVCache."""
        return torch.arange(tokens, device=self.count.device) + self.count

    def passed(self, tokens: int) -> None:
        """See KVCache."""
        self.count += tokens

    def _list_run(self) -> None:
        """Number the next pages that follow each other in the pool; by the device alone, so nobody waits for it."""
        begin = end = self._listed
        first = self.pages[begin].number
        while end < len(self.pages) and self.pages[end].number == first + end - begin:
            end += 1
        torch.arange(first, first + end - begin, out=self.table[begin:end])
        self._listed = end

    @property
    def address(self) -> int:
        """Where its table lies."""
        return self.table.data_ptr()


class DeviceDelta(DeltaState):
    """A DeltaState that moves into memory of a device when it is first advanced."""

    def __init__(self, spec: GatedDeltaSpec, places: Places[tuple[Tensor, Tensor]]) -> None:
        super().__init__(spec)
        self._places = places
        self._moved = False

    def reserve(self, tokens: int) -> None:
        """See DeltaState."""
        if not self._moved:
            parked = self.conv, self.recurrent
            self.conv, self.recurrent = self._places.lend(self)
            self.conv.copy_(parked[0])
            self.recurrent.copy_(parked[1])
            self._moved = True
        super().reserve(tokens)

    def fork(self, length: int) -> "DeviceDelta":
        """See DeltaState. On the host."""
        assert length == self.position
        twin = copy.copy(self)
        twin.conv, twin.recurrent = (part.to("cpu", copy=True) for part in (self.conv, self.recurrent))
        twin._moved = False
        return twin

    @property
    def address(self) -> int:
        """Where it lies."""
        return self.conv.data_ptr()


class DeviceStates:
    """Makes the states of the first `layers` layers of a model."""

    def __init__(
        self, spec: ModelSpec, kv: KVFormat, memory: Memory, *, layers: int, sequences: int, context: int
    ) -> None:
        mixers = [layer.mixer for layer in spec.layers[:layers]]
        self._spec = spec
        attention = sum(mixer is Mixer.FULL_ATTENTION for mixer in mixers)
        self.pool = DevicePool(spec, kv, memory, layers=attention, sequences=sequences, context=context)
        self._deltas: dict[int, Places[tuple[Tensor, Tensor]]] = {}
        for number, mixer in enumerate(mixers):
            if mixer is not Mixer.FULL_ATTENTION:
                assert spec.gated_delta is not None
                shapes = DeltaState.shapes(spec.gated_delta)
                conv, recurrent = (memory.empty(STATES, (sequences, *shape), torch.float32) for shape in shapes)
                self._deltas[number] = Places(list(zip(conv, recurrent, strict=True)))

    def new_state(self, number: int) -> LayerState:
        """See Home."""
        if number in self._deltas:
            assert self._spec.gated_delta is not None
            return DeviceDelta(self._spec.gated_delta, self._deltas[number])
        return self.pool.cache()
