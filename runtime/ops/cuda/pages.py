"""Keys and values of a sequence in pages of a pool on the device: storing those of new tokens, and reading rows.

Stored is what `mosaic.runtime.kv.Page.write` stores, bit for bit. The length stays on the device; the caller advances
it there once the new tokens were attended to.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.format.e4m3 import E4M3_MAX
from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.ops.cuda.decode import FROM_HALF, weights_at

PAGE = tl.constexpr(PAGE_TOKENS)
LARGEST = tl.constexpr(E4M3_MAX)
# A float32 of less than 2^-6 is a multiple of 2^-9, or rounded to one, in E4M3: as 2^14 plus it is in float32.
NORMAL = tl.constexpr(2.0**-6)
COARSE = tl.constexpr(2.0**14)


@dataclass(frozen=True)
class Pages:
    """Keys and values of a sequence: pages of a pool on the device.

    `values` [P, 2 (key, value), 64, kv heads, d] float32, bfloat16, or E4M3 codes (uint8) with `scales` float32
    [P, 2, 64, kv heads, 1]; d is a power of two, at least 16. `table` int32 [n]: the sequence's pages in order, with
    room for the new tokens; `length` int32 [1]: the tokens before those.
    """

    values: Tensor
    scales: Tensor | None
    table: Tensor
    length: Tensor

    def __post_init__(self) -> None:
        assert self.values.shape[1:3] == (2, PAGE_TOKENS), self.values.shape
        assert (self.values.dtype == torch.uint8) == (self.scales is not None)
        assert self.scales is None or self.scales.shape == (*self.values.shape[:-1], 1), self.scales.shape
        assert self.table.dtype == self.length.dtype == torch.int32


@triton.jit
def read_rows(
    values: tl.tensor, scales: tl.tensor, rows: tl.tensor, wanted: tl.tensor, columns: tl.tensor, dim: tl.constexpr
) -> tl.tensor:
    """Columns of the rows of the pool that are wanted, float32 [rows, columns]; the others are 0."""
    result = weights_at(values + rows[:, None] * dim + columns[None, :], wanted[:, None])
    if scales is not None:
        result *= tl.load(scales + rows, mask=wanted, other=0.0)[:, None] * FROM_HALF
    return result


@triton.jit
def codes_of(x: tl.tensor) -> tl.tensor:
    """E4M3 codes (uint8) of float32 up to 448 in size, rounded to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 20 bits of the fraction go; its exponent has a bias of 127, that of a code one of 7.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    tiny = (tl.abs(x) + COARSE).to(tl.int32, bitcast=True) & 0xF
    return (tl.where(tl.abs(x) < NORMAL, tiny, normal) | ((bits >> 24) & ~0x7F)).to(tl.uint8)


@triton.jit
def brain_floats(x: tl.tensor) -> tl.tensor:
    """Finite float32 rounded to the nearest bfloat16, ties to even; by bits, since not every target can by itself."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    kv_heads: int,
    dim: tl.constexpr,
) -> None:
    token, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, dim)
    position = tl.load(lengths) + token
    page = tl.load(table + position // PAGE).to(tl.int64)
    source = (token.to(tl.int64) * kv_heads + head) * dim + column
    for part in tl.static_range(2):
        row = ((page * 2 + part) * PAGE + position % PAGE) * kv_heads + head
        kept = tl.load((key if part == 0 else value) + source)
        if scales is not None:
            scale = tl.div_rn(tl.max(tl.abs(kept), axis=0), LARGEST)
            scale = tl.where(scale == 0, 1.0, scale)
            tl.store(scales + row, scale)
            kept = codes_of(tl.clamp(tl.div_rn(kept, scale), -LARGEST, LARGEST))
        elif values.dtype.element_ty == tl.bfloat16:
            kept = brain_floats(kept)
        tl.store(values + row * dim + column, kept)


def store(key: Tensor, value: Tensor, pages: Pages) -> None:
    """Key and value [T, kv heads, d] float32, finite, of the tokens behind the first `pages.length`."""
    tokens, kv_heads, dim = key.shape
    assert key.shape == value.shape, (key.shape, value.shape)
    assert pages.values.shape[3:] == (kv_heads, dim), (pages.values.shape, key.shape)
    assert key.dtype == value.dtype == torch.float32, (key.dtype, value.dtype)
    memory = pages.values, pages.scales, pages.table, pages.length
    _store[tokens, kv_heads](key.contiguous(), value.contiguous(), *memory, kv_heads=kv_heads, dim=dim, num_warps=1)
