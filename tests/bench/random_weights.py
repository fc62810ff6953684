"""Random weights at the speed of memory: slices of one pool of normal values, moved to size by their exponents.

Drawing 35 billion normal values would take minutes; here every tensor starts at a place of its own in a pool that is
drawn once, and every 128x128 block of a matrix gets a power of two of its own, so that its scale differs from its
neighbours'. The same seed and name give the same values, whatever else is drawn and in whatever order. Since a power
of two changes neither E4M3 codes nor Q8_0 quotients, the pool is quantised once, and all forms hold the same model.
"""

import zlib
from collections.abc import Iterable
from functools import cached_property
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.shape import Weight
from mosaic.format import e4m3
from mosaic.format.tensors import QUANTIZABLE, Role
from support.tiny_tokenizer import END_OF_TEXT, IM_END

POOL = 1 << 24  # values
REACH = 3.5  # standard deviations; what is larger is cut off, so that E4M3 of 128 times the value never saturates
E4M3_EXPONENT = 7  # of that 128
BLOCK_EXPONENTS = (-3, 2)  # from, up to; their root mean square is about 1
GAINS = {Role.ROUTER: 2.0, Role.LM_HEAD: 2.0}  # spread routing, and logits that prefer some token
END_ROWS = (END_OF_TEXT, IM_END)  # of the head: zero, so that hardly any answer ends before its token limit
Q8_BLOCK = 32  # weights in a block of llama.cpp's Q8_0: a float16 scale, then so many signed bytes

Array = NDArray[Any]
Bits = NDArray[np.uint16]  # bfloat16


class RandomWeights:
    """The values of the tensors of a BF16 release, by their names there."""

    def __init__(self, weights: Iterable[Weight], seed: int) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._seed = seed
        self._grids: dict[str, NDArray[np.int16]] = {}
        self._pool = np.empty(POOL, np.uint16)
        generator = np.random.default_rng(seed)
        for part in _parts():
            values = generator.standard_normal(part.stop - part.start, np.float32).clip(-REACH, REACH)
            values[np.abs(values) < 1e-3] = 1e-3  # an exponent cannot be subtracted from zero
            self._pool[part] = values.astype(e4m3.BFLOAT16).view(np.uint16)

    def bfloat16(self, name: str, first: int, last: int) -> Bits:
        """Elements first..last of the flattened tensor, as bits."""
        weight = self._weights[name]
        small = self._small(weight)
        if small is not None:
            return small.astype(e4m3.BFLOAT16).view(np.uint16)[first:last]
        columns = weight.shape[-1]
        first_row, last_row = first // columns, -(-last // columns)
        lifts = (self._exponents(weight) << 7).view(np.uint16).repeat(e4m3.BLOCK, axis=1)[:, :columns]
        rows = np.arange(first_row, last_row)
        values = self._rows(self._pool, weight, first_row, last_row) + lifts[rows // e4m3.BLOCK]
        values[self._ends(weight, rows)] = 0
        start = first - first_row * columns
        return values.reshape(-1)[start : start + last - first]

    def codes(self, name: str, first_row: int, last_row: int) -> e4m3.Codes:
        """E4M3 codes of some rows; read-only."""
        return self._rows(self._codes, self._weights[name], first_row, last_row)

    def scales(self, name: str, first_row: int, last_row: int) -> e4m3.Scales:
        """Their scales, bfloat16; whole blocks only."""
        exponents = self._exponents(self._weights[name])[first_row // e4m3.BLOCK : last_row // e4m3.BLOCK]
        return np.exp2(exponents.astype(np.float32) - E4M3_EXPONENT).astype(e4m3.BFLOAT16)

    def q8_0(self, name: str, first_row: int, last_row: int) -> NDArray[np.uint8]:
        """Some rows as Q8_0 [rows, K / 32, 34], the bytes that quantising `bfloat16` gives."""
        weight, quotients = self._weights[name], self._q8_quotients
        rows = np.arange(first_row, last_row)
        values = self._rows(quotients, weight, first_row, last_row).reshape(rows.size, -1, Q8_BLOCK)
        exponents = self._exponents(weight)[rows // e4m3.BLOCK].repeat(e4m3.BLOCK // Q8_BLOCK, axis=1)
        scales = self._rows(self._q8_scales, weight, first_row, last_row, Q8_BLOCK)
        scales = np.ldexp(scales, exponents[:, : scales.shape[1]]).astype("<f2")
        blocks = np.empty((*scales.shape, 2 + Q8_BLOCK), np.uint8)
        blocks[..., :2] = scales[..., None].view(np.uint8)
        blocks[..., 2:] = values.view(np.uint8)
        blocks[self._ends(weight, rows)] = 0
        return blocks

    @cached_property
    def _codes(self) -> e4m3.Codes:
        codes = np.empty(POOL, np.uint8)
        for part in _parts():
            codes[part] = e4m3.encode(self._floats(part) * np.float32(2**E4M3_EXPONENT))
        return codes

    @cached_property
    def _q8_scales(self) -> NDArray[np.float32]:
        scales = np.empty(POOL // Q8_BLOCK, np.float32)
        for part in _parts():
            largest = np.abs(self._floats(part).reshape(-1, Q8_BLOCK)).max(axis=1)
            scales[part.start // Q8_BLOCK : part.stop // Q8_BLOCK] = largest / np.float32(127)
        return scales

    @cached_property
    def _q8_quotients(self) -> NDArray[np.int8]:
        quotients = np.empty(POOL, np.int8)
        for part in _parts():
            inverse = 1 / self._q8_scales[part.start // Q8_BLOCK : part.stop // Q8_BLOCK]
            values = self._floats(part) * inverse.repeat(Q8_BLOCK)
            quotients[part] = np.copysign(np.floor(np.abs(values) + np.float32(0.5)), values)  # halves away from zero
        return quotients

    def _floats(self, part: slice) -> e4m3.Floats:
        values: e4m3.Floats = self._pool[part].view(e4m3.BFLOAT16).astype(np.float32)
        return values

    def _small(self, weight: Weight) -> Array | None:
        """What is no matrix: norms, decays and convolutions, in the ranges of trained models."""
        generator = self._generator(weight, "small")
        if weight.role is Role.NORM:
            mean = 1.0 if weight.key.endswith("delta.norm") else 0.0  # all others are stored less one
            return generator.normal(mean, 0.1, weight.count)
        if weight.role is Role.CONVOLUTION:
            return generator.normal(0.0, 0.5, weight.count)
        if weight.role is Role.DECAY and weight.key.endswith("a_log"):
            return np.log(generator.uniform(1.0, 16.0, weight.count))
        if weight.role is Role.DECAY:
            step = np.exp(generator.uniform(np.log(1e-3), np.log(1e-1), weight.count))
            return np.asarray(np.log(np.expm1(step)))  # softplus gives the step back
        return None

    def _exponents(self, weight: Weight) -> NDArray[np.int16]:
        """A power of two for every block, about gain / sqrt(fan in) over the whole matrix."""
        if weight.name not in self._grids:
            columns = weight.shape[-1]
            shape = e4m3.grid((weight.count // columns, columns))
            gain = GAINS.get(weight.role, 1.0)
            size = 0 if weight.role is Role.EMBEDDING else round(log2(gain) - log2(columns) / 2)
            spread = BLOCK_EXPONENTS if weight.role in QUANTIZABLE else (0, 1)
            blocks = self._generator(weight, "blocks").integers(*spread, shape)
            self._grids[weight.name] = (size + blocks).astype(np.int16)
        return self._grids[weight.name]

    def _ends(self, weight: Weight, rows: Array) -> NDArray[np.bool_]:
        """Which of some rows are those that end an answer."""
        return np.isin(rows, END_ROWS if weight.role is Role.LM_HEAD else ())

    def _rows(self, pool: Array, weight: Weight, first: int, last: int, width: int = 1) -> Array:
        """Rows of a matrix from a pool that has an entry for every `width` weights, repeated without end."""
        size, columns = POOL // width, weight.shape[-1] // width
        start = (zlib.crc32(weight.name.encode()) * Q8_BLOCK // width + first * columns) % size
        count = (last - first) * columns
        assert count <= size, f"{weight.name}: {count} values at once"
        run = pool[start : start + count]
        if run.size < count:
            run = np.concatenate([run, pool[: count - run.size]])
        run.setflags(write=False)
        return run.reshape(-1, columns)

    def _generator(self, weight: Weight, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(f"{weight.name} {purpose}".encode())])


def _parts() -> Iterable[slice]:
    """The pool piece by piece, so that no large array of floats is ever in memory."""
    step = 1 << 20
    return (slice(first, first + step) for first in range(0, POOL, step))
