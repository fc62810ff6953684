"""Block-E4M3 matrix times many vectors on tensor cores: what prompts need. The grouped form is in `grouped`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.decode import BLOCK, halves, multiplier
from mosaic.runtime.ops.cuda.matvec import parts
from mosaic.runtime.ops.cuda.split import PART, split
from mosaic.runtime.weights import E4M3Matrix

ROWS = 64  # rows of x of a program
COLUMNS = 64  # rows of the matrix of a program; divides BLOCK
STEP = tl.constexpr(64)  # columns of the matrix at a time; divides BLOCK


@triton.jit
def dot_tile(
    high: tl.tensor,
    low: tl.tensor,
    factors: tl.tensor,
    source: tl.tensor,
    wanted: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    first: int,
    rows: int,
    columns: int,
    height: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Rows [first, first + tile) of codes [rows, columns] times the `wanted` of the `source` rows: [height, tile].

    Products of float16 are added up in float32, step by step of columns; a step's sum is scaled and added to those
    before. A row's result does not depend on the others.
    """
    row, lane = first + tl.arange(0, tile), tl.arange(0, STEP)
    begin = source.to(tl.int64)[:, None] * columns
    matrix = row.to(tl.int64)[None, :] * columns
    blocks = first // BLOCK * tl.cdiv(columns, BLOCK)
    total = tl.zeros((height, tile), tl.float32)
    for start in range(0, columns, STEP):
        column = start + lane
        inside = column < columns
        held = (row < rows)[None, :] & inside[:, None]
        weights = halves(tl.load(codes + matrix + column[:, None], mask=held, other=0))
        given = wanted[:, None] & inside[None, :]
        sums = tl.dot(tl.load(low + begin + column[None, :], mask=given, other=0.0), weights)
        sums = tl.dot(tl.load(high + begin + column[None, :], mask=given, other=0.0), weights, sums)
        total += sums * (multiplier(scales, blocks + start // BLOCK) * PART)
    return total * tl.load(factors + source, mask=wanted, other=0.0)[:, None]


@triton.jit
def _matmul(
    high: tl.tensor,
    low: tl.tensor,
    factors: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    count: int,
    rows: int,
    columns: int,
    height: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    source, first = tl.program_id(0) * height + tl.arange(0, height), tl.program_id(1) * tile
    wanted = source < count
    sums = dot_tile(high, low, factors, source, wanted, codes, scales, first, rows, columns, height, tile)
    row = first + tl.arange(0, tile)
    place = source.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + place, sums, mask=wanted[:, None] & (row < rows)[None, :])


def matmul(x: Tensor, weight: E4M3Matrix) -> Tensor:
    """X [T, K] float32 times weight [N, K] transposed: [T, N] float32."""
    (count, columns), (rows, depth) = x.shape, weight.shape
    assert depth == columns, (x.shape, weight.shape)
    pieces = split(x)
    out = torch.empty(count, rows, device=x.device)
    _matmul[triton.cdiv(count, ROWS), triton.cdiv(rows, COLUMNS)](
        pieces.high,
        pieces.low,
        pieces.factors,
        *parts(weight),
        out,
        count,
        rows,
        columns,
        height=ROWS,
        tile=COLUMNS,
        num_warps=4,
        num_stages=2,
    )
    return out
