"""Matrix times many vectors: what prompts need. Block-E4M3 on tensor cores; its grouped form is in `grouped`.

Plain weights, of which a model has few, are multiplied in float32: routing is to depend on no rounding but that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.decode import BLOCK, halves, multiplier, weights_at
from mosaic.runtime.ops.cuda.matvec import parts
from mosaic.runtime.ops.cuda.split import PART, split
from mosaic.runtime.weights import E4M3Matrix

ROWS = 64  # rows of x of a program
COLUMNS = 64  # rows of the matrix of a program; divides BLOCK
STEP = tl.constexpr(64)  # columns of the matrix at a time; divides BLOCK
PLAIN_ROWS, PLAIN_COLUMNS, PLAIN_STEP = 32, 32, 16  # the same of plain weights


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


@triton.jit
def _matmul_plain(
    x: tl.tensor,
    matrix: tl.tensor,
    out: tl.tensor,
    count: int,
    rows: int,
    columns: int,
    height: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
) -> None:
    source = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)[:, None]
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)[None, :]
    wanted, held = source < count, row < rows
    total = tl.zeros((height, tile), tl.float32)
    for start in range(0, columns, step):
        column = start + tl.arange(0, step)
        inside = column < columns
        values = tl.load(x + source * columns + column[None, :], mask=wanted & inside[None, :], other=0.0)
        weights = weights_at(matrix + row * columns + column[:, None], held & inside[:, None])
        total = tl.dot(values, weights, total, input_precision="ieee")
    tl.store(out + source * rows + row, total, mask=wanted & held)


def matmul_plain(x: Tensor, weight: Tensor) -> Tensor:
    """X [T, K] float32 times weight [N, K] (bfloat16, float16 or float32) transposed: [T, N] float32."""
    (count, columns), (rows, depth) = x.shape, weight.shape
    assert depth == columns, (x.shape, weight.shape)
    assert x.dtype == torch.float32, x.dtype
    assert weight.is_contiguous()
    out = torch.empty(count, rows, device=x.device)
    sizes = {"count": count, "rows": rows, "columns": columns}
    tiles = {"height": PLAIN_ROWS, "tile": PLAIN_COLUMNS, "step": PLAIN_STEP}
    grid = triton.cdiv(count, PLAIN_ROWS), triton.cdiv(rows, PLAIN_COLUMNS)
    _matmul_plain[grid](x.contiguous(), weight, out, **sizes, **tiles, num_warps=4, num_stages=2)
    return out
