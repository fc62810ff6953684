"""What a sequence remembers: a paged KV cache per attention layer, a fixed-size state per linear-attention layer.

A sequence can be snapshotted and taken back to a snapshot: recurrent states are copied (they cannot be rolled back),
the KV cache only grows and is cut to its old length.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.format.direct import HUGE_PAGE, aligned
from mosaic.format.e4m3 import E4M3_MAX
from mosaic.format.spec import GatedDeltaSpec, Mixer, ModelSpec

PAGE_TOKENS = 64


class KVFormat(StrEnum):
    """How keys and values are stored. Attention reads what was stored."""

    F32 = "f32"
    BF16 = "bf16"
    E4M3 = "e4m3"  # codes and one float32 scale per token and head


class KVPool:
    """Pages of keys and values, shared by all layers and sequences; a freed page is used again.

    Pages come in slabs of a huge page of memory: read at 4 KiB apiece, a third of the memory's speed is lost.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, kv: KVFormat) -> None:
        self._shape = (2, PAGE_TOKENS, num_kv_heads, head_dim)
        self._format = kv
        self._pages: list[tuple[Tensor, Tensor]] = []  # values, and the scales of E4M3 (else empty)
        self._free: list[int] = []

    def allocate(self) -> int:
        """A page of which nothing may be assumed."""
        if not self._free:
            pages = self._slab()
            first = len(self._pages)
            self._pages += pages
            self._free += range(len(self._pages) - 1, first - 1, -1)
        return self._free.pop()

    def _slab(self) -> list[tuple[Tensor, Tensor]]:
        kinds = {KVFormat.F32: torch.float32, KVFormat.BF16: torch.bfloat16, KVFormat.E4M3: torch.float8_e4m3fn}
        kind = kinds[self._format]
        nbytes = math.prod(self._shape) * kind.itemsize
        count = max(HUGE_PAGE // nbytes, 1)
        values = torch.from_numpy(aligned(count * nbytes)[: count * nbytes]).view(kind).view(count, *self._shape)
        scales = torch.empty((count, *self._shape[:-1], 1) if self._format is KVFormat.E4M3 else (count, 0))
        return list(zip(values, scales, strict=True))

    @property
    def format(self) -> KVFormat:
        """How keys and values are stored."""
        return self._format

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._shape[2]

    @property
    def token_nbytes(self) -> int:
        """Bytes of the key and value of one token."""
        width = {KVFormat.F32: 4, KVFormat.BF16: 2, KVFormat.E4M3: 1}[self._format]
        scale = 4 if self._format is KVFormat.E4M3 else 0
        return 2 * self.kv_heads * (self._shape[3] * width + scale)

    def address(self, page: int) -> tuple[int, int]:
        """Where a page lies and where its scales do (0 if it has none)."""
        values, scales = self._pages[page]
        return values.data_ptr(), scales.data_ptr() if scales.numel() else 0

    def free(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)

    def write(self, page: int, first: int, rows: Tensor) -> None:
        """Store rows [2 (key, value), n, kv heads, d] from token `first` of a page on."""
        span, (values, page_scales) = slice(first, first + rows.shape[1]), self._pages[page]
        if self._format is KVFormat.E4M3:
            scales = rows.abs().amax(dim=-1, keepdim=True) / E4M3_MAX
            scales[scales == 0] = 1.0
            page_scales[:, span] = scales
            rows = (rows / scales).clamp(-E4M3_MAX, E4M3_MAX)
        values[:, span] = rows.to(values.dtype)

    def read(self, page: int) -> Tensor:
        """Everything in a page as float32 [2, PAGE_TOKENS, kv heads, d]."""
        values, scales = self._pages[page]
        return values.float() * scales if self._format is KVFormat.E4M3 else values.float()


class KVCache:
    """Keys and values of one layer of one sequence: a list of pages."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pages: list[int] = []
        self._addresses = np.empty((2, 16), np.int64)  # of the pages and of their scales
        self.length = 0

    @property
    def format(self) -> KVFormat:
        """How keys and values are stored."""
        return self._pool.format

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._pool.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes that the tokens so far take."""
        return self.length * self._pool.token_nbytes

    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Where the pages lie ([2, PAGE_TOKENS, kv heads, d] each), and their scales if the format has them."""
        pages, scales = self._addresses[:, : len(self._pages)]
        return pages, scales if self.format is KVFormat.E4M3 else None

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add key and value [T, kv heads, d]."""
        rows, done = torch.stack((key, value)), 0
        while done < rows.shape[1]:
            first = self.length % PAGE_TOKENS
            if first == 0:
                self._grow()
            count = min(PAGE_TOKENS - first, rows.shape[1] - done)
            self._pool.write(self._pages[-1], first, rows[:, done : done + count])
            self.length += count
            done += count

    def _grow(self) -> None:
        page = self._pool.allocate()
        if len(self._pages) == self._addresses.shape[1]:
            self._addresses = np.concatenate((self._addresses, np.empty_like(self._addresses)), axis=1)
        self._addresses[:, len(self._pages)] = self._pool.address(page)
        self._pages.append(page)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, float32 [S, kv heads, d]."""
        both = torch.cat([self._pool.read(page) for page in self._pages], dim=1)[:, : self.length]
        return both[0], both[1]

    def cut(self, length: int) -> None:
        """Forget everything from token `length` on."""
        keep = -(-length // PAGE_TOKENS)
        freed = self._pages[keep:]
        del self._pages[keep:]  # first forgotten, then freed: interrupted in between, a page is lost and not shared
        self.length = length
        self._pool.free(freed)


class DeltaState:
    """State of one linear-attention layer: convolution history [taps - 1, C], recurrent [value heads, d_k, d_v]."""

    def __init__(self, spec: GatedDeltaSpec) -> None:
        self._spec = spec
        self.reset()

    def reset(self) -> None:
        """Remember nothing."""
        spec = self._spec
        self.position = 0
        self.conv = torch.zeros(spec.conv_kernel - 1, spec.conv_dim)
        self.recurrent = torch.zeros(spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)


def new_layer_state(spec: ModelSpec, number: int, pool: KVPool) -> KVCache | DeltaState:
    """What layer `number` remembers of an empty sequence."""
    if spec.layers[number].mixer is Mixer.FULL_ATTENTION:
        return KVCache(pool)
    assert spec.gated_delta is not None
    return DeltaState(spec.gated_delta)


@dataclass(frozen=True)
class Snapshot:
    """A sequence at an earlier moment. Good for going back only: later tokens must have been added to the same one."""

    length: int
    delta: tuple[tuple[Tensor, Tensor], ...]


class SequenceState:
    """Everything one sequence remembers. `layers` holds a KVCache or DeltaState per decoder layer."""

    def __init__(self, spec: ModelSpec, pool: KVPool) -> None:
        self.length = 0
        self.layers = [new_layer_state(spec, number, pool) for number in range(len(spec.layers))]

    def snapshot(self) -> Snapshot:
        """The state as it is now, copied: operations may change it in place."""
        delta = (layer for layer in self.layers if isinstance(layer, DeltaState))
        return Snapshot(self.length, tuple((layer.conv.clone(), layer.recurrent.clone()) for layer in delta))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this sequence."""
        assert snapshot.length <= self.length
        delta = iter(snapshot.delta)
        for layer in self.layers:
            if isinstance(layer, KVCache):
                layer.cut(snapshot.length)
            else:
                layer.conv, layer.recurrent = (part.clone() for part in next(delta))
                layer.position = snapshot.length
        self.length = snapshot.length

    def reset(self) -> None:
        """Go back to the beginning."""
        for layer in self.layers:
            if isinstance(layer, KVCache):
                layer.cut(0)
            else:
                layer.reset()
        self.length = 0

    def release(self) -> None:
        """Give the pages back; the sequence is over."""
        for layer in self.layers:
            if isinstance(layer, KVCache):
                layer.cut(0)
