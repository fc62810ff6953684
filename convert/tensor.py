"""Converts one tensor slice by slice: source values in, stored bytes out, errors counted.

Reading and converting are apart, so that other threads can read ahead.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.plan import Planned
from mosaic.convert.quantize import Location, NonFinite, count_codes, finite, quantize, sound_codes
from mosaic.convert.reader import Slice, TensorReader
from mosaic.convert.recipe import Treatment
from mosaic.convert.sums import CodeUse, ErrorSums
from mosaic.format import e4m3
from mosaic.format.source import NUMPY, Checkpoint


class TensorConversion:
    """One planned tensor. Convert all slices in order, then ask for `scale_bytes`, `sums` and `use`."""

    def __init__(self, checkpoint: Checkpoint, planned: Planned, policy: NonFinite) -> None:
        self.planned = planned
        self.sums = ErrorSums()
        self.use = CodeUse()
        self.reader = TensorReader(checkpoint, planned.stored.spec.shape, planned.piece, planned.scale)
        self._policy = policy
        self._scales: list[NDArray[Any]] = []

    def convert(self, data: Slice) -> memoryview:
        """The stored bytes of the next slice."""
        where = self.reader.location(data.first)
        if data.scales is not None:
            return _bytes(self._from_fp8(data.values, data.scales, where))
        if self.planned.stored.scale:
            return _bytes(self._quantize(data.values, where))
        return _bytes(self._from_floats(data.values, where))

    def scale_bytes(self) -> bytes:
        """The stored scales: [ceil(N/128), ceil(K/128)] in the planned dtype."""
        assert self.planned.stored.scale
        return np.concatenate(self._scales).astype(NUMPY[self.planned.stored.scale.dtype]).tobytes()

    def _quantize(self, values: NDArray[Any], where: Location) -> e4m3.Codes:
        """Codes of one slice. The kernel takes float32 and bfloat16 and stops at what it cannot take."""
        rule = self.planned.scale_rule
        direct = values.dtype in (e4m3.BFLOAT16, np.float32)
        result = quantize(values, rule, self.sums) if direct else None
        if result is None:
            numbers = finite(values, self._policy, self.sums, where)
            if (large := np.abs(numbers) > e4m3.LARGEST_WEIGHT).any():
                raise where.too_large(large, numbers, "E4M3")
            result = quantize(numbers, rule, self.sums)
            assert result is not None
        codes, scales = result
        self._store(scales, count_codes(codes))
        return codes

    def _from_fp8(self, codes: e4m3.Codes, scales: NDArray[Any], where: Location) -> NDArray[Any]:
        """Codes as they are, or dequantised in float32 where they cannot stay."""
        counts = count_codes(codes)
        if any(counts[code] for code in e4m3.NAN_CODES):
            codes = sound_codes(codes, self._policy, self.sums, where)
            counts = count_codes(codes)
        if self.planned.passes_through:
            self._store(scales.copy(), counts)  # what was read lies in memory that is used again
            return codes
        return self._narrow(e4m3.dequantize(codes, scales), where)

    def _store(self, scales: NDArray[Any], counts: NDArray[np.uint64]) -> None:
        self._scales.append(scales)
        self.use.add_scales(scales)
        self.use.add_codes(counts)

    def _from_floats(self, values: NDArray[Any], where: Location) -> NDArray[Any]:
        """Kept byte for byte, or converted to another float type."""
        before = self.sums.nonfinite
        numbers = finite(values, self._policy, self.sums, where)
        if self.planned.treatment is not Treatment.KEEP:
            return self._narrow(numbers, where)
        return values if self.sums.nonfinite == before else numbers.astype(values.dtype)

    def _narrow(self, numbers: NDArray[np.float32], where: Location) -> NDArray[Any]:
        """In the planned float type, the error counted."""
        dtype = self.planned.stored.weight.dtype
        with np.errstate(over="ignore"):
            stored = numbers.astype(NUMPY[dtype])
        back = stored.astype(np.float32)
        if not (held := np.isfinite(back)).all():
            raise where.too_large(~held, numbers, dtype)
        self.sums.add_values(numbers, back)
        return stored


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
