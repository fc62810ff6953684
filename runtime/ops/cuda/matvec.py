"""Matrix times a few vectors: decoding. Memory is the limit, so a weight is read once for all vectors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.format import e4m3
from mosaic.runtime.ops.cuda.decode import dot_rows
from mosaic.runtime.weights import E4M3Matrix, Weight

MOST_VECTORS = 8
ROWS = 16  # of a program: with as many columns as a block, a 16-byte load for each of 128 threads
FEW_VECTORS = 2  # up to so many, four warps have registers enough for the sums


@triton.jit
def _matvec(
    x: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: int,
    columns: int,
    count: int,
    vectors: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    first = tl.program_id(0) * tile
    sums = dot_rows(x, matrix, scales, first, rows, columns, count, vectors, tile)
    row, vector = first + tl.arange(0, tile), tl.arange(0, vectors)
    inside = (vector < count)[:, None] & (row < rows)[None, :]
    tl.store(out + vector[:, None] * rows + row[None, :], sums, mask=inside)


def matvec(x: Tensor, weight: Weight) -> Tensor:
    """X [B, K] float32, B from 1 to 8, times weight [N, K] transposed: [B, N] float32."""
    (count, columns), (rows, depth) = x.shape, weight.shape
    assert 1 <= count <= MOST_VECTORS, x.shape
    assert depth == columns, (x.shape, weight.shape)
    assert x.dtype == torch.float32, x.dtype
    matrix, scales = parts(weight)
    out = torch.empty(count, rows, device=x.device)
    vectors = triton.next_power_of_2(count)
    _matvec[triton.cdiv(rows, ROWS),](
        x.contiguous(),
        matrix,
        scales,
        out,
        rows,
        columns,
        count,
        vectors=vectors,
        tile=ROWS,
        num_warps=4 if vectors <= FEW_VECTORS else 8,
    )
    return out


def parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """What kernels read of a weight: codes and their scales, or the matrix and None."""
    if not isinstance(weight, E4M3Matrix):
        assert weight.is_contiguous()
        return weight, None
    assert weight.codes.dtype == torch.uint8, weight.codes.dtype
    assert weight.scales.shape == e4m3.grid(tuple(weight.shape)), weight.scales.shape
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    return weight.codes, weight.scales
