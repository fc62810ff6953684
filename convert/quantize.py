"""Turns slices of source values into stored bytes and counts the error made. Knows nothing of files.

Codes, scales and error sums of quantised tensors come from one native pass; codes and scales are bit-equal to the
reference in `mosaic.format.e4m3` (tests/format/test_e4m3.py), on every ISA and so are the sums (tests/native).
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic import _native
from mosaic.format import e4m3
from mosaic.format.errors import InputError


class NonFinite(StrEnum):
    """What to do about weights that are NaN or infinite."""

    REFUSE = "refuse"
    ZERO = "zero"


@dataclass
class ErrorSums:
    """Running error of one tensor: stored value against source value."""

    count: int = 0
    signal: float = 0.0  # sum of squares of the source
    noise: float = 0.0  # sum of squares of the difference
    max_abs_error: float = 0.0
    zeroed: int = 0  # weights that are not 0 and became 0
    nonfinite: int = 0  # weights that were set to 0 on request
    scale_min: float = inf
    scale_max: float = 0.0

    def add(self, count: int, signal: float, noise: float, max_abs_error: float, zeroed: int) -> None:
        """Count one slice of `count` weights."""
        self.count += count
        self.signal += signal
        self.noise += noise
        self.max_abs_error = max(self.max_abs_error, max_abs_error)
        self.zeroed += zeroed

    def add_values(self, source: NDArray[np.float32], stored: NDArray[np.float32]) -> None:
        """Count one slice, both float32 of the same shape."""
        difference = stored - source
        self.add(
            source.size,
            float(np.square(source, dtype=np.float64).sum()),
            float(np.square(difference, dtype=np.float64).sum()),
            float(np.abs(difference).max(initial=0.0)),
            int(np.count_nonzero((stored == 0) & (source != 0))),
        )

    def add_scales(self, scales: NDArray[Any]) -> None:
        """Count the scales of one slice."""
        values = scales.astype(np.float32)
        self.scale_min = min(self.scale_min, float(values.min()))
        self.scale_max = max(self.scale_max, float(values.max()))

    @property
    def relative_l2(self) -> float:
        """|stored - source| / |source|, Euclidean."""
        return float((self.noise / self.signal) ** 0.5) if self.signal else 0.0

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise in dB; None where there is no noise."""
        return 10 * log10(self.signal / self.noise) if self.noise and self.signal else None


def check_kernels() -> None:
    """Refuse a MOSAIC_ISA that this build or this CPU does not have."""
    try:
        _native.isa()
    except ValueError as error:
        raise InputError(
            "the kernels asked for are not to be had", found=error, remedy="unset MOSAIC_ISA, or choose one of these"
        ) from error


def quantize(values: NDArray[Any], sums: ErrorSums) -> tuple[e4m3.Codes, e4m3.Scales] | None:
    """Codes and bfloat16 scales of float32 or bfloat16 values [rows, columns], both multiples of the block.

    None if a value is not a number or larger than any scale allows: `finite` and `Location` say which.
    """
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty(e4m3.grid(values.shape), np.uint16)
    weights = values.view(np.uint16) if values.dtype == e4m3.BFLOAT16 else values
    errors = _native.e4m3_quantize(weights, codes, scales, e4m3.LARGEST_WEIGHT)
    if errors is None:
        return None
    result = scales.view(e4m3.BFLOAT16)
    sums.add(values.size, *errors)
    sums.add_scales(result)
    return codes, result


def finite(values: NDArray[Any], policy: NonFinite, sums: ErrorSums, where: "Location") -> NDArray[np.float32]:
    """Values as float32, without NaN and infinity: refused, or set to 0 and counted."""
    result = values.astype(np.float32)
    bad = ~np.isfinite(result)
    if bad.any():
        if policy is NonFinite.REFUSE:
            raise where.not_a_number(bad, result)
        sums.nonfinite += int(np.count_nonzero(bad))
        result[bad] = 0.0
    return result


def sound_codes(codes: e4m3.Codes, policy: NonFinite, sums: ErrorSums, where: "Location") -> e4m3.Codes:
    """Codes of an FP8 source without NaN codes: refused, or set to the code of 0 and counted."""
    bad = e4m3.is_nan(codes)
    if bad.any():
        if policy is NonFinite.REFUSE:
            raise where.not_a_number(bad, codes)
        sums.nonfinite += int(np.count_nonzero(bad))
        codes = np.where(bad, np.uint8(0), codes)
    return codes


@dataclass(frozen=True)
class Location:
    """Where a slice stands, for errors: source file and tensor, which of stacked matrices, its rows.

    `origin` is the first row of the matrix that is stored, `first_row` that of the slice within it.
    """

    file: Path
    tensor: str
    index: int | None
    origin: int
    first_row: int

    def not_a_number(self, bad: NDArray[np.bool_], values: NDArray[Any]) -> InputError:
        """NaN or infinity in the source."""
        remedy = "download the file again; if it is really so, --nonfinite zero (with --overwrite) sets them to 0"
        return self._refusal("the source holds weights that are not numbers", bad, values, "finite weights", remedy)

    def too_large(self, bad: NDArray[np.bool_], values: NDArray[Any], dtype: str) -> InputError:
        """A number that the stored dtype cannot hold."""
        remedy = "choose a recipe that keeps this tensor; such weights are hardly meant"
        return self._refusal(f"a weight is too large for {dtype}", bad, values, f"weights {dtype} can hold", remedy)

    def _refusal(
        self, problem: str, bad: NDArray[np.bool_], values: NDArray[Any], expected: str, remedy: str
    ) -> InputError:
        """The error for the first bad element of a slice."""
        position = tuple(int(axis[0]) for axis in np.nonzero(bad))
        value = values[position]
        shown = f"code 0x{value:02X}" if values.dtype == np.uint8 else str(value)
        row, *rest = position[0] + self.first_row, *position[1:]
        place = [*([] if self.index is None else [self.index]), self.origin + row, *rest]
        block = f", block ({row // e4m3.BLOCK}, {rest[0] // e4m3.BLOCK})" if len(rest) == 1 else ""
        return InputError(
            problem,
            file=self.file,
            tensor=self.tensor,
            found=f"{shown} at {place}{block}; {np.count_nonzero(bad)} in this slice",
            expected=expected,
            remedy=remedy,
        )
