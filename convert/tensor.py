"""Converts one tensor slice by slice: source values in, stored bytes out, errors counted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.plan import Planned
from mosaic.convert.quantize import ErrorSums, Location, NonFinite, finite, quantize, sound_codes
from mosaic.convert.recipe import Treatment
from mosaic.format import e4m3
from mosaic.format.errors import InputError
from mosaic.format.source import NUMPY, Checkpoint

SLICE_WEIGHTS = 1 << 20  # about 20 MB of scratch; the slices are part of the report's arithmetic, so they are fixed


class TensorConversion:
    """The bytes of one planned tensor. Take all `chunks` first, then `scale_bytes` and `sums`."""

    def __init__(self, checkpoint: Checkpoint, planned: Planned, policy: NonFinite) -> None:
        self.sums = ErrorSums()
        self._checkpoint = checkpoint
        self._planned = planned
        self._policy = policy
        self._scales: list[NDArray[Any]] = []

    def chunks(self) -> Iterator[memoryview]:
        """The stored weight, in order."""
        planned = self._planned
        source_scales = self._read_scales() if planned.scale else None
        for first, last in _slices(planned.stored.spec.shape):
            values = self._checkpoint.read(planned.piece, (first, last))
            where = self._location(first)
            if source_scales is not None:
                codes = sound_codes(values, self._policy, self.sums, where)
                block_rows = source_scales[first // e4m3.BLOCK : -(-last // e4m3.BLOCK)]
                yield _bytes(self._from_fp8(codes, block_rows, where))
            elif planned.stored.scale:
                yield _bytes(self._quantize(values, where))
            else:
                yield _bytes(self._from_floats(values, where))

    def scale_bytes(self) -> bytes:
        """The stored scales: [ceil(N/128), ceil(K/128)] in the planned dtype."""
        assert self._planned.stored.scale
        return np.concatenate(self._scales).astype(NUMPY[self._planned.stored.scale.dtype]).tobytes()

    def _quantize(self, values: NDArray[Any], where: Location) -> e4m3.Codes:
        """Codes of one slice. The kernel takes float32 and bfloat16 and stops at what it cannot take."""
        direct = values.dtype in (e4m3.BFLOAT16, np.float32)
        result = quantize(values, self.sums) if direct else None
        if result is None:
            numbers = finite(values, self._policy, self.sums, where)
            if (large := np.abs(numbers) > e4m3.LARGEST_WEIGHT).any():
                raise where.too_large(large, numbers, "E4M3")
            result = quantize(numbers, self.sums)
            assert result is not None
        codes, scales = result
        self._scales.append(scales)
        return codes

    def _from_fp8(self, codes: e4m3.Codes, scales: NDArray[Any], where: Location) -> NDArray[Any]:
        """Codes as they are, or dequantised in float32 where they cannot stay."""
        self.sums.add_scales(scales)
        if self._planned.passes_through:
            self._scales.append(scales)
            return codes
        return self._narrow(e4m3.dequantize(codes, scales), where)

    def _from_floats(self, values: NDArray[Any], where: Location) -> NDArray[Any]:
        """Kept byte for byte, or converted to another float type."""
        numbers = finite(values, self._policy, self.sums, where)
        if self._planned.treatment is Treatment.KEEP and not self.sums.nonfinite:
            return values
        return self._narrow(numbers, where)

    def _narrow(self, numbers: NDArray[np.float32], where: Location) -> NDArray[Any]:
        """In the planned float type, the error counted."""
        dtype = self._planned.stored.weight.dtype
        with np.errstate(over="ignore"):
            stored = numbers.astype(NUMPY[dtype])
        back = stored.astype(np.float32)
        if not (held := np.isfinite(back)).all():
            raise where.too_large(~held, numbers, dtype)
        self.sums.add_values(numbers, back)
        return stored

    def _location(self, first: int) -> Location:
        piece = self._planned.piece
        origin = piece.rows[0] if piece.rows else 0
        return Location(self._checkpoint.tensors[piece.name].file, piece.name, piece.index, origin, first)

    def _read_scales(self) -> NDArray[Any]:
        assert self._planned.scale
        scales = self._checkpoint.read(self._planned.scale)
        values = scales.astype(np.float32)
        bad = ~((values > 0) & (values <= e4m3.LARGEST_SCALE))  # NaN compares false
        if bad.any():
            block = tuple(int(axis[0]) for axis in np.nonzero(bad))
            raise InputError(
                "an FP8 source has a scale that means nothing",
                file=self._checkpoint.tensors[self._planned.scale.name].file,
                tensor=self._planned.scale.name,
                found=f"{values[block]} for block {block}; {np.count_nonzero(bad)} such scales",
                expected=f"scales above 0, up to {e4m3.LARGEST_SCALE:.3e}",
                remedy="download the file again, or convert the BF16 checkpoint",
            )
        return scales


def _slices(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Row ranges of about SLICE_WEIGHTS weights, cut between blocks."""
    row = int(np.prod(shape[1:], dtype=np.int64)) or 1
    step = max(SLICE_WEIGHTS // row // e4m3.BLOCK, 1) * e4m3.BLOCK
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
