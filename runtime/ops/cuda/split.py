"""float32 activations for tensor cores: each row as a power of two times the sum of two float16.

With a row's largest element scaled to [2^14, 2^15), the sum of both is an element up to 2^-22 of it, or 2^-39 of that
largest one: nearly float32's own rounding, for two products instead of one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(2.0**-14)


@dataclass(frozen=True)
class Split:
    """`high` and `low` float16 [T, K], `factors` float32 [T]: (high + low) * PART * factor.

    A factor is the power of two in the row's largest element.
    """

    high: Tensor
    low: Tensor
    factors: Tensor


@triton.jit
def _split(
    x: tl.tensor, high: tl.tensor, low: tl.tensor, factors: tl.tensor, columns: int, width: tl.constexpr
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0)
    largest = tl.max(tl.abs(value), axis=0)
    # An exponent stands in a float32 as 127 more: with 127 + 14 - (field - 127) the largest becomes 2^14 and more.
    # Rows of less than 2^-112 are scaled by no more than those.
    field = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    value *= ((268 - field) << 23).to(tl.float32, bitcast=True)
    rounded = value.to(tl.float16)
    tl.store(high + row * columns + column, rounded, mask=inside)
    tl.store(low + row * columns + column, (value - rounded.to(tl.float32)).to(tl.float16), mask=inside)
    tl.store(factors + row, (field << 23).to(tl.float32, bitcast=True))


def split(x: Tensor) -> Split:
    """Of x [T, K] float32, finite."""
    rows, columns = x.shape
    assert x.dtype == torch.float32, x.dtype
    high, low = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for _ in range(2))
    factors = torch.empty(rows, device=x.device)
    width = triton.next_power_of_2(columns)
    warps = min(max(width // 256, 1), 16)
    _split[rows,](x.contiguous(), high, low, factors, columns, width=width, num_warps=warps)
    return Split(high, low, factors)
