"""Keys and values of attention layers, in pages of a pool. What a whole sequence remembers is `state`.

A page belongs to whoever holds its `Page` and is free again when nobody does: Python's count of references is the only
one there is, so no interruption can leave a page with two owners, or with none.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.format.direct import HUGE_PAGE, aligned
from mosaic.format.e4m3 import E4M3_MAX

PAGE_TOKENS = 64


class KVFormat(StrEnum):
    """How keys and values are stored. Attention reads what was stored."""

    F32 = "f32"
    BF16 = "bf16"
    E4M3 = "e4m3"  # codes and one float32 scale per token and head


class Page:
    """Room for PAGE_TOKENS tokens of one layer: `values` [2 (key, value), PAGE_TOKENS, kv heads, d].

    `scales` [2, PAGE_TOKENS, kv heads, 1] are those of E4M3, else empty. `address`: where the values lie and where the
    scales do (0 if there are none). `number`: which one of its pool it is.
    """

    __slots__ = ("__weakref__", "address", "number", "scales", "values")

    def __init__(self, number: int, values: Tensor, scales: Tensor) -> None:
        self.number = number
        self.values = values
        self.scales = scales
        self.address = values.data_ptr(), scales.data_ptr() if scales.numel() else 0

    def write(self, first: int, rows: Tensor) -> None:
        """Store rows [2, n, kv heads, d] from token `first` on."""
        span = slice(first, first + rows.shape[1])
        if self.scales.numel():
            scales = rows.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
            scales[scales == 0] = 1.0
            self.scales[:, span] = scales
            rows = (rows / scales).clamp(-E4M3_MAX, E4M3_MAX)
        self.values[:, span] = rows.to(self.values.dtype)

    def read(self) -> Tensor:
        """Everything in it as float32 [2, PAGE_TOKENS, kv heads, d]."""
        return self.values.float() * self.scales if self.scales.numel() else self.values.float()

    def copy(self, source: "Page", count: int) -> None:
        """Hold what the first `count` tokens of another page are stored as."""
        self.values[:, :count] = source.values[:, :count]
        if self.scales.numel():
            self.scales[:, :count] = source.scales[:, :count]


class _Place:
    """Memory for a page, and the page that has it now."""

    def __init__(self, number: int, values: Tensor, scales: Tensor) -> None:
        self._memory = number, values, scales
        self.page: Callable[[], Page | None] = _nobody

    def lend(self) -> Page:
        """The memory as a page. The place is free again when nothing refers to that."""
        page = Page(*self._memory)
        self.page = weakref.ref(page)
        return page


def _nobody() -> None:
    """Nobody has had this place yet."""


class KVPool:
    """Pages for all layers and sequences. Memory that was taken once is kept and used again.

    It comes in slabs of a huge page: read at 4 KiB apiece, a third of the memory's speed is lost.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, kv: KVFormat) -> None:
        self.format = kv
        self.page_shape = (2, PAGE_TOKENS, num_kv_heads, head_dim)
        self._places: list[_Place] = []
        self._idle: list[_Place] = []  # some of those that are free, the next one last

    @property
    def token_nbytes(self) -> int:
        """Bytes of the key and value of one token in one layer."""
        _, _, kv_heads, head_dim = self.page_shape
        width = {KVFormat.F32: 4, KVFormat.BF16: 2, KVFormat.E4M3: 1}[self.format]
        scale = 4 if self.format is KVFormat.E4M3 else 0
        return 2 * kv_heads * (head_dim * width + scale)

    @property
    def pages_in_use(self) -> int:
        """Pages that somebody holds, counted one by one: some 50 us per thousand."""
        return len(self._places) - len(self._free())

    def allocate(self) -> Page:
        """A page of which nothing may be assumed, the caller's own."""
        if not self._idle:
            self._idle = self._free()
        if not self._idle:
            self._slab()
        return self._idle.pop().lend()

    def cache(self, pages: Sequence[Page] = (), length: int = 0) -> "KVCache":
        """A cache of the first `length` tokens of a sequence, which these pages hold."""
        return KVCache(self, pages, length)

    def _free(self) -> list[_Place]:
        return [place for place in reversed(self._places) if place.page() is None]

    def _own(self, values: Tensor, scales: Tensor) -> None:
        """Take memory for further pages, values [n, ..] and scales [n, ..]."""
        numbers = range(len(self._places), len(self._places) + len(values))
        slab = [_Place(*memory) for memory in zip(numbers, values, scales, strict=True)]
        self._places += slab
        self._idle = slab[::-1]

    @torch.inference_mode(False)  # pages are written to inside and outside of it
    def _slab(self) -> None:
        """Take more memory."""
        nbytes = self.token_nbytes * PAGE_TOKENS
        self._own(*page_tensors(self.format, max(HUGE_PAGE // nbytes, 1), self.page_shape, _huge))


def page_tensors(
    kv: KVFormat, count: int, shape: Sequence[int], empty: Callable[[Sequence[int], torch.dtype], Tensor]
) -> tuple[Tensor, Tensor]:
    """Memory for pages: values [count, *shape]; scales [count, *shape[:-1], 1], or [count, 0] if there are none."""
    kinds = {KVFormat.F32: torch.float32, KVFormat.BF16: torch.bfloat16, KVFormat.E4M3: torch.float8_e4m3fn}
    values = empty((count, *shape), kinds[kv])
    if kv is KVFormat.E4M3:
        return values, empty((count, *shape[:-1], 1), torch.float32)
    return values, torch.empty(count, 0)


def _huge(shape: Sequence[int], kind: torch.dtype) -> Tensor:
    """Memory in huge pages."""
    nbytes = math.prod(shape) * kind.itemsize
    return torch.from_numpy(aligned(nbytes)[:nbytes]).view(kind).view(*shape)


class KVCache:
    """Keys and values of the first `length` tokens of one sequence, in one layer. It only grows; see `fork`."""

    def __init__(self, pool: KVPool, pages: Sequence[Page] = (), length: int = 0) -> None:
        assert len(pages) == pages_of(length)
        self.pool = pool
        self.format = pool.format
        self.kv_heads = pool.page_shape[2]
        self.pages = list(pages)
        self._addresses = np.empty((2, max(16, len(pages))), np.int64)  # of the pages and of their scales
        if pages:
            self._addresses[:, : len(pages)] = np.array([page.address for page in pages]).T
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes that the tokens so far take."""
        return self.length * self.pool.token_nbytes

    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Where the pages lie ([2, PAGE_TOKENS, kv heads, d] each), and their scales if the format has them."""
        pages, scales = self._addresses[:, : len(self.pages)]
        return pages, scales if self.format is KVFormat.E4M3 else None

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens. They count from now on, and are to be written before anyone reads."""
        self.length += tokens
        while len(self.pages) < pages_of(self.length):
            self._grow()

    def positions(self, tokens: int) -> Tensor:
        """Those of the last tokens, int64 [T]."""
        return torch.arange(self.length - tokens, self.length)

    def write(self, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv heads, d] of the last T tokens."""
        rows = torch.stack((key, value))
        place = self.length - rows.shape[1]
        while place < self.length:
            first = place % PAGE_TOKENS
            count = min(PAGE_TOKENS - first, self.length - place)
            done = place - self.length + rows.shape[1]
            self.pages[place // PAGE_TOKENS].write(first, rows[:, done : done + count])
            place += count

    def passed(self, tokens: int) -> None:
        """So many tokens were attended to. Where lengths are on a device, they are counted there."""

    def _grow(self) -> None:
        page = self.pool.allocate()
        if len(self.pages) == self._addresses.shape[1]:
            self._addresses = np.concatenate((self._addresses, np.empty_like(self._addresses)), axis=1)
        self._addresses[:, len(self.pages)] = page.address
        self.pages.append(page)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, float32 [S, kv heads, d]."""
        both = torch.cat([page.read() for page in self.pages], dim=1)[:, : self.length]
        return both[0], both[1]

    def fork(self, length: int) -> "KVCache":
        """Another cache of the first `length` tokens. Both can grow: full pages are shared, a part of one is copied."""
        assert length <= self.length
        pages, rest = self.pages[: pages_of(length)], length % PAGE_TOKENS
        if rest:
            last = self.pool.allocate()
            last.copy(pages[-1], rest)
            pages[-1] = last
        return self.pool.cache(pages, length)


def pages_of(length: int) -> int:
    """How many pages so many tokens take."""
    return -(-length // PAGE_TOKENS)
