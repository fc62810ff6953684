"""RMSNorm, alone and with the residual sum before it: a program for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def inverse_rms(x: tl.tensor, count: int, eps: float) -> tl.tensor:
    """1 / rms of the `count` elements of x that are not filled up with 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / count + eps))


@triton.jit
def _rms_norm(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    stride: int,
    columns: int,
    eps: float,
    offset: float,
    width: tl.constexpr,
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    inside = column < columns
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    if y is not None:
        value += tl.load(y + row * columns + column, mask=inside, other=0.0)
        tl.store(total + row * columns + column, value, mask=inside)
    factor = offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value * inverse_rms(value, columns, eps) * factor, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """X / rms(x) * (offset + weight) over the last axis of x [.., K] float32; rows may have gaps between them."""
    out = torch.empty(x.shape, device=x.device)
    _launch(x, None, weight, None, out, eps, offset)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(x + y, its rms_norm) of x and y [.., K]."""
    assert x.shape == y.shape, (x.shape, y.shape)
    total, out = torch.empty(x.shape, device=x.device), torch.empty(x.shape, device=x.device)
    _launch(x, y.contiguous(), weight, total, out, eps, offset)
    return total, out


def _launch(
    x: Tensor, y: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float, offset: float
) -> None:
    columns = x.shape[-1]
    assert weight.shape == (columns,), (x.shape, weight.shape)
    assert x.dtype == torch.float32, x.dtype
    rows = x.reshape(-1, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    width = triton.next_power_of_2(columns)
    warps = min(max(width // 256, 1), 16)
    sizes = {"stride": rows.stride(0), "columns": columns, "eps": eps, "offset": offset, "width": width}
    _rms_norm[len(rows),](rows, y, weight, total, out, **sizes, num_warps=warps)
