"""Converts one tensor slice by slice: source values in, stored bytes out, errors counted.

Reading and converting are apart, so that other threads can read ahead.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.plan import Planned
from mosaic.convert.quantize import Location, NonFinite, count_codes, finite, quantize, sound_codes
from mosaic.convert.reader import Slice, TensorReader
from mosaic.convert.recipe import Treatment
from mosaic.convert.sums import CodeUse, ErrorSums
from mosaic.format import direct, e4m3
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

    def convert(self, data: Slice, room: Callable[[int], direct.Bytes]) -> direct.Bytes:
        """The stored bytes of the next slice, in `room` for them."""
        where = self.reader.location(data.first)
        dtype = NUMPY[self.planned.stored.weight.dtype]
        stored = room(data.values.size * dtype.itemsize)
        if self.planned.stored.scale and data.scales is None:
            self._quantize(data.values, stored.reshape(data.values.shape), where)
            return stored
        values = self._from_floats(data.values, where) if data.scales is None else self._from_fp8(data, where)
        stored[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return stored

    def scale_bytes(self) -> direct.Bytes:
        """The stored scales: [ceil(N/128), ceil(K/128)] in the planned dtype."""
        assert self.planned.stored.scale
        scales = self._scales[0] if len(self._scales) == 1 else np.concatenate(self._scales)
        dtype = NUMPY[self.planned.stored.scale.dtype]
        return np.ascontiguousarray(scales.astype(dtype, copy=False)).reshape(-1).view(np.uint8)

    def _quantize(self, values: NDArray[Any], codes: e4m3.Codes, where: Location) -> None:
        """Codes of one slice. The kernel takes float32 and bfloat16 and stops at what it cannot take."""
        rule = self.planned.scale_rule
        suits = values.dtype in (e4m3.BFLOAT16, np.float32)
        scales = quantize(values, rule, codes, self.sums, self.use) if suits else None
        if scales is None:
            numbers = finite(values, self._policy, self.sums, where)
            if (large := np.abs(numbers) > e4m3.LARGEST_WEIGHT).any():
                raise where.too_large(large, numbers, "E4M3")
            scales = quantize(numbers, rule, codes, self.sums, self.use)
            assert scales is not None
        self._scales.append(scales)

    def _from_fp8(self, data: Slice, where: Location) -> NDArray[Any]:
        """Codes as they are, or dequantised in float32 where they cannot stay."""
        codes, scales = data.values, data.scales
        assert scales is not None
        counts = count_codes(codes)
        if counts[e4m3.NAN_CODE]:
            codes = sound_codes(codes, self._policy, self.sums, where)
            counts = count_codes(codes)
        if not self.planned.passes_through:
            return self._narrow(e4m3.dequantize(codes, scales), where)
        self._scales.append(scales)
        self.use.add_scales(scales)
        self.use.codes += counts
        return codes

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
