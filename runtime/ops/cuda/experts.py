"""The resident experts of a few tokens: decoding. Gate, up and SwiGLU are one launch, down the second.

Outputs stay apart for each expert of a token until `add_outputs`: those of experts that are not resident come from
elsewhere, and all are added up in routing order. (As in native/src/experts.cpp.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.ops.cuda.decode import dot_rows, silu

ROWS = 16  # of a program
COLUMNS = 256  # of a program that adds outputs


@triton.jit
def _gate_up(
    x: tl.tensor,
    slots: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    ranks: int,
    hidden: int,
    inner: int,
    blocks: int,
    tile: tl.constexpr,
) -> None:
    pair, first = tl.program_id(1), tl.program_id(0) * tile
    slot = tl.load(slots + pair).to(tl.int64)
    if slot >= 0:
        vector = x + pair // ranks * hidden
        gates = codes + slot * inner * hidden * 3
        block_scales = scales + slot * blocks * 3
        gate = dot_rows(vector, gates, block_scales, first, inner, hidden, 1, 1, tile)
        up = dot_rows(vector, gates + inner * hidden, block_scales + blocks, first, inner, hidden, 1, 1, tile)
        row = first + tl.arange(0, tile)[None, :]
        tl.store(out + pair * inner + row, silu(gate) * up, mask=row < inner)


@triton.jit
def _down(
    x: tl.tensor,
    slots: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    hidden: int,
    inner: int,
    blocks: int,
    tile: tl.constexpr,
) -> None:
    pair, first = tl.program_id(1), tl.program_id(0) * tile
    slot = tl.load(slots + pair).to(tl.int64)
    if slot >= 0:
        downs = codes + (slot * 3 + 2) * inner * hidden
        block_scales = scales + (slot * 3 + 2) * blocks
        sums = dot_rows(x + pair * inner, downs, block_scales, first, hidden, inner, 1, 1, tile)
        row = first + tl.arange(0, tile)[None, :]
        tl.store(out + pair * hidden + row, sums, mask=row < hidden)


@triton.jit
def _add_outputs(
    outputs: tl.tensor, weights: tl.tensor, out: tl.tensor, ranks: int, hidden: int, tile: tl.constexpr
) -> None:
    token, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * tile + tl.arange(0, tile)
    inside = column < hidden
    total = tl.zeros((tile,), tl.float32)
    for rank in range(ranks):
        pair = token * ranks + rank
        total += tl.load(weights + pair) * tl.load(outputs + pair * hidden + column, mask=inside, other=0.0)
    tl.store(out + token * hidden + column, total, mask=inside)


def apply_experts(x: Tensor, slots: Tensor, experts: ExpertSlots, outputs: Tensor) -> None:
    """Outputs [T, R, H] of the experts in slots [T, R] (int32) for x [T, H]; where a slot is -1, they stay as they are.

    Every expert of every token is read for itself: for a few tokens. See `grouped` for many.
    """
    check_places(x, slots, experts, outputs)
    (tokens, ranks), hidden, inner = slots.shape, experts.hidden, experts.inner
    pairs = tokens * ranks
    between = torch.empty(pairs, inner, device=x.device)
    sizes = {"hidden": hidden, "inner": inner, "blocks": experts.blocks, "tile": ROWS, "num_warps": 4}
    memory = slots, experts.codes, experts.scales
    _gate_up[triton.cdiv(inner, ROWS), pairs](x, *memory, between, ranks=ranks, **sizes)
    _down[triton.cdiv(hidden, ROWS), pairs](between, *memory, outputs, **sizes)


def add_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over R of outputs [T, R, H] by weights [T, R], in their order: [T, H]."""
    tokens, ranks, hidden = outputs.shape
    assert weights.shape == (tokens, ranks), weights.shape
    assert outputs.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(tokens, hidden, device=outputs.device)
    _add_outputs[triton.cdiv(hidden, COLUMNS), tokens](
        outputs, weights, out, ranks, hidden, tile=COLUMNS, num_warps=COLUMNS // 32
    )
    return out


def check_places(x: Tensor, slots: Tensor, experts: ExpertSlots, outputs: Tensor) -> None:
    """What belongs together has the same sizes, and lies as the kernels read it."""
    assert x.shape == (len(slots), experts.hidden), (x.shape, slots.shape)
    assert outputs.shape == (*slots.shape, experts.hidden), (outputs.shape, slots.shape)
    assert slots.dtype == torch.int32, slots.dtype
    assert x.dtype == outputs.dtype == torch.float32, (x.dtype, outputs.dtype)
    assert all(part.is_contiguous() for part in (x, slots, outputs))
