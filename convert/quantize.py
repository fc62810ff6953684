"""Turns slices of source values into stored bytes and counts the error made. Knows nothing of files.

Codes, scales and error sums of quantised tensors come from one native pass; codes and scales are bit-equal to the
reference in `mosaic.format.e4m3` (tests/format/test_e4m3.py), on every ISA and so are the sums (tests/native).
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic import _native
from mosaic.convert.recipe import ScaleRule
from mosaic.convert.sums import CodeUse, ErrorSums
from mosaic.format import e4m3
from mosaic.format.errors import InputError


class NonFinite(StrEnum):
    """What to do about weights that are NaN or infinite."""

    REFUSE = "refuse"
    ZERO = "zero"


def check_kernels() -> None:
    """Refuse a MOSAIC_ISA that this build or this CPU does not have."""
    try:
        _native.isa()
    except ValueError as error:
        raise InputError(
            "the kernels asked for are not to be had", found=error, remedy="unset MOSAIC_ISA, or choose one of these"
        ) from error


def quantize(
    values: NDArray[Any], rule: ScaleRule, codes: e4m3.Codes, sums: ErrorSums, use: CodeUse
) -> e4m3.Scales | None:
    """Puts the codes of float32 or bfloat16 values [rows, columns], both multiples of the block, into `codes`.

    The bfloat16 scales; None if a value is not a number or larger than any scale allows: `finite` and `Location` say
    which, and `codes` means nothing.
    """
    scales = np.empty(e4m3.grid(values.shape), np.uint16)
    weights = values.view(np.uint16) if values.dtype == e4m3.BFLOAT16 else values
    candidates = e4m3.MSE_CANDIDATES if rule is ScaleRule.MSE else 1
    result = _native.e4m3_quantize(
        weights, codes, scales, use.codes, use.exponents, e4m3.LARGEST_WEIGHT, candidates, e4m3.MSE_STEP
    )
    if result is None:
        return None
    signal, noise, max_abs_error, zeroed, amax_noise, least, largest = result
    sums.add(values.size, signal, noise, max_abs_error, zeroed, amax_noise)
    use.add_range(least, largest)
    values_of_scales: e4m3.Scales = scales.view(e4m3.BFLOAT16)
    return values_of_scales


def count_codes(codes: e4m3.Codes | bytes) -> NDArray[np.uint64]:
    """How often each magnitude occurs among codes: their signs are off."""
    counts = np.zeros(e4m3.MAGNITUDES, np.uint64)
    _native.e4m3_count(codes, counts)
    return counts


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
    """Codes of an FP8 source that holds NaN codes: refused, or set to the code of 0 and counted."""
    bad = e4m3.is_nan(codes)
    if policy is NonFinite.REFUSE:
        raise where.not_a_number(bad, codes)
    sums.nonfinite += int(np.count_nonzero(bad))
    return np.where(bad, np.uint8(0), codes)


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
