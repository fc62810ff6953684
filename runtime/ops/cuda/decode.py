"""Weights by their bits, and sums of products with them: what kernels call, nothing that is launched."""

import triton
import triton.language as tl

from mosaic.format import e4m3

BLOCK = tl.constexpr(e4m3.BLOCK)
# E4M3 has an exponent bias of 7, float16 one of 15: the same bits mean 2^-8 of the value, subnormals too.
FROM_HALF = tl.constexpr(256.0)


@triton.jit
def halves(codes: tl.tensor) -> tl.tensor:
    """Of E4M3 codes (uint8, not NaN) the value / 256 as float16: exact."""
    bits = (codes.to(tl.int16) << 8) >> 1  # sseeeemmm0000000: the sign is there twice
    return (bits & ~0x4000).to(tl.float16, bitcast=True)


@triton.jit
def multiplier(scales: tl.tensor, block: int) -> tl.tensor:
    """What `halves` of a block are multiplied with, float32: finite, since 448 times the scale is."""
    return tl.load(scales + block).to(tl.float32) * FROM_HALF


@triton.jit
def weights_at(places: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Weights as float32, 0 where they are not inside: bfloat16, float16, float32, or `halves` of codes."""
    stored = tl.load(places, mask=inside, other=0)
    if places.dtype.element_ty == tl.uint8:
        stored = halves(stored)
    return stored.to(tl.float32)


@triton.jit
def dot_rows(
    x: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    first: int,
    rows: int,
    columns: int,
    count: int,
    vectors: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Rows [first, first + tile) of a matrix [rows, columns] times x [count, columns]: [vectors, tile].

    `tile` divides BLOCK and `first`; `scales` is None for weights that have none. A product is scaled once and added
    with others of its column modulo BLOCK; these sums are added up at the end.
    """
    row, vector, lane = first + tl.arange(0, tile), tl.arange(0, vectors), tl.arange(0, BLOCK)
    begin = row.to(tl.int64)[:, None] * columns
    blocks = first // BLOCK * tl.cdiv(columns, BLOCK)
    total = tl.zeros((vectors, tile, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = (column < columns)[None, :]
        weights = weights_at(matrix + begin + column[None, :], (row < rows)[:, None] & inside)
        wanted = (vector < count)[:, None] & inside
        values = tl.load(x + vector[:, None] * columns + column[None, :], mask=wanted, other=0.0)
        if scales is not None:
            values *= multiplier(scales, blocks + start // BLOCK)
        total += weights[None, :, :] * values[:, None, :]
    return tl.sum(total, axis=2)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """X * sigmoid(x)."""
    return x * tl.sigmoid(x)
