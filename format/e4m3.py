"""Blockwise E4M3: codes and scales, the reference in numpy. No other Python file knows 128 or 448.

A matrix W [N, K] is a grid of 128x128 blocks (partial ones at the right and bottom edge); a block holds one code
per weight and one scale, and W ~ code value * scale, in float32 (exact for bfloat16 scales). Rule `amax`: the scale is
amax / 448 rounded *up* to bfloat16, so that no weight is ever clipped and quantising a dequantised matrix gives the
same codes and scales again. Rule `mse` tries larger scales and takes the one with the least noise. docs/FORMAT.md
section 3 is normative.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BLOCK = 128
E4M3_MAX = 448.0
NAN_CODE = 0x7F  # with either sign
MAGNITUDES = 128  # codes without their sign
SMALLEST_NORMAL_CODE = 0x08  # below it, 0x01 to 0x07 are subnormal
SMALLEST_NORMAL_BF16 = 2.0**-126
LARGEST_SCALE = 73 * 2.0**113  # the largest bfloat16 s with which 448 * s is still a float32
LARGEST_WEIGHT = E4M3_MAX * LARGEST_SCALE
MSE_CANDIDATES = 32  # scales that rule `mse` tries, from that of rule `amax` upwards,
MSE_STEP = 4  # so many bfloat16 values apart: together almost one octave

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Scales = NDArray[Any]  # bfloat16 or float32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VALUES: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
VALUES.setflags(write=False)
_LANES = 16


def decode(codes: Codes) -> Floats:
    """The float32 value of every code; exact. The two NaN codes decode to NaN."""
    return VALUES[codes]


def encode(values: Floats) -> Codes:
    """The nearest code of every float32 value, ties to even, saturating at +-448; NaN becomes a NaN code."""
    clamped = np.clip(values, -E4M3_MAX, E4M3_MAX)
    return clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scale grid of a matrix [N, K]: [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def whole_blocks(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of whole 128x128 blocks: only such tensors are stored as E4M3."""
    return len(shape) == 2 and all(size > 0 and size % BLOCK == 0 for size in shape)


def block_scales(amax: Floats) -> Scales:
    """bfloat16 scales of blocks with the given absolute maxima (finite): amax / 448, rounded up, never subnormal.

    The float32 division never rounds down onto a bfloat16, so rounding its result up is exact (tests/format).
    """
    quotient = np.maximum(amax / np.float32(E4M3_MAX), np.float32(SMALLEST_NORMAL_BF16))
    return _round_up(quotient)


def quantize(weights: Floats) -> tuple[Codes, Scales]:
    """Codes [N, K] and bfloat16 scales [ceil(N/128), ceil(K/128)] of finite float32 weights [N, K], rule `amax`."""
    blocks = to_blocks(weights)
    scales = block_scales(np.abs(blocks).max(axis=(1, 3), initial=0.0))
    codes = _encode_blocks(blocks, scales)
    settle_scales(codes, scales)
    return from_blocks(codes, weights.shape), scales


def quantize_mse(weights: Floats) -> tuple[Codes, Scales]:
    """As `quantize`, by rule `mse`: per block the scale of the least noise among MSE_CANDIDATES, the first of equals.

    Candidates lie above the scale of rule `amax`, so nothing clips. Larger ones than LARGEST_SCALE are not tried.
    """
    blocks = to_blocks(weights)
    smallest = block_scales(np.abs(blocks).max(axis=(1, 3), initial=0.0))
    scales, codes = smallest.copy(), _encode_blocks(blocks, smallest)
    least = block_noise(blocks, codes, scales)
    for step in range(MSE_STEP, MSE_CANDIDATES * MSE_STEP, MSE_STEP):
        tried = (smallest.view(np.uint16) + np.uint16(step)).view(BFLOAT16)
        tried_codes = _encode_blocks(blocks, tried)
        noise = block_noise(blocks, tried_codes, tried)
        better = (noise < least) & (tried.astype(np.float32) <= LARGEST_SCALE)
        least[better], scales[better] = noise[better], tried[better]
        codes = np.where(better[:, None, :, None], tried_codes, codes)
    settle_scales(codes, scales)
    return from_blocks(codes, weights.shape), scales


def _encode_blocks(blocks: Floats, scales: Scales) -> Codes:
    return encode(np.divide(blocks, scales.astype(np.float32)[:, None, :, None], dtype=np.float32))


def block_noise(blocks: Floats, codes: Codes, scales: Scales) -> NDArray[np.float64]:
    """Sum of squared errors of every block [:, 128, :, 128], rounded as the native kernel rounds it.

    Values are divided by the power of two in the scale; squares are summed in 16 lanes (column mod 16), in float32
    within a row of the block and in float64 from row to row, then over the lanes.
    """
    mantissa, exponent = np.frexp(scales.astype(np.float32))
    mantissa, exponent = mantissa[:, None, :, None] * 2, exponent[:, None, :, None] - 1
    values = np.ldexp(np.abs(blocks), -exponent)
    squares = np.square(np.abs(decode(codes)) * mantissa - values)
    rows, columns = blocks.shape[0], blocks.shape[2]
    lanes = squares.reshape(rows, BLOCK, columns, BLOCK // _LANES, _LANES)
    row_sums = np.add.accumulate(lanes, axis=3, dtype=np.float32)[:, :, :, -1].astype(np.float64)
    lane_sums = np.add.accumulate(row_sums, axis=1)[:, -1]
    noise: NDArray[np.float64] = np.ldexp(np.add.accumulate(lane_sums, axis=-1)[..., -1], 2 * exponent[:, 0, :, 0])
    return noise


def settle_scales(codes: Codes, scales: Scales) -> None:
    """Set the scale of every block [:, 128, :, 128] of nothing but +-0 to 1: any would do, so one is fixed."""
    scales[~(codes & 0x7F).any(axis=(1, 3))] = 1.0


def is_nan(codes: Codes) -> NDArray[np.bool_]:
    """Where codes are NaN."""
    nan: NDArray[np.bool_] = np.equal(codes & 0x7F, NAN_CODE)
    return nan


def dequantize(codes: Codes, scales: Scales) -> Floats:
    """Float32 weights [N, K] of codes [N, K] and scales [ceil(N/128), ceil(K/128)]."""
    values = to_blocks(decode(codes)) * scales.astype(np.float32)[:, None, :, None]
    return from_blocks(values, codes.shape)


def to_blocks(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, K] as [ceil(N/128), 128, ceil(K/128), 128], ragged edges filled with zeros."""
    rows, columns = matrix.shape
    block_rows, block_columns = grid(matrix.shape)
    padding = ((0, block_rows * BLOCK - rows), (0, block_columns * BLOCK - columns))
    if any(after for _, after in padding):
        matrix = np.pad(matrix, padding)
    return matrix.reshape(block_rows, BLOCK, block_columns, BLOCK)


def from_blocks(blocks: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The inverse of `to_blocks` for a matrix of the given shape [N, K]."""
    rows, columns = shape
    matrix = blocks.reshape(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return np.ascontiguousarray(matrix[:rows, :columns])


def _round_up(values: Floats) -> Scales:
    """Positive float32 to the next bfloat16 that is not smaller."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16).view(BFLOAT16)
