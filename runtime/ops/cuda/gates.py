"""What is multiplied by a gate, element by element: outputs of attention, and the inner vector of SwiGLU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.decode import silu

COLUMNS = 512  # of a program


@triton.jit
def _gated(
    x: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    columns: int,
    x_stride: int,
    gate_stride: int,
    gate_step: int,
    swiglu: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(gate + row * gate_stride + column * gate_step, mask=inside, other=0.0)
    tl.store(out + row * columns + column, value * (silu(weight) if swiglu else tl.sigmoid(weight)), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """X * sigmoid(gate): x [.., K], gate [.., K] or [.., 1] float32; rows of both may have gaps between them."""
    return _launch(x, gate, swiglu=False)


def swiglu_between(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up of [.., I] float32, between the matrices of an expert; rows may have gaps between them."""
    assert gate.shape == up.shape, (gate.shape, up.shape)
    return _launch(up, gate, swiglu=True)


def _launch(x: Tensor, gate: Tensor, swiglu: bool) -> Tensor:
    columns = x.shape[-1]
    assert gate.shape in (x.shape, (*x.shape[:-1], 1)), (x.shape, gate.shape)
    assert x.dtype == gate.dtype == torch.float32, (x.dtype, gate.dtype)
    rows, gates = _rows(x), _rows(gate)
    out = torch.empty(x.shape, device=x.device)
    grid = len(rows), triton.cdiv(columns, COLUMNS)
    step = 1 if gate.shape == x.shape else 0
    strides = {"x_stride": rows.stride(0), "gate_stride": gates.stride(0), "gate_step": step}
    _gated[grid](rows, gates, out, columns, **strides, swiglu=swiglu, tile=COLUMNS, num_warps=4)
    return out


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
