"""Running figures of one tensor: the error that was made, and how codes and scales are used. Knows nothing of files."""

from dataclasses import dataclass, field
from math import inf, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.format import e4m3

EXPONENTS = 256  # of a positive float32
FLOAT32_MANTISSA = 23  # bits


@dataclass
class ErrorSums:
    """Stored values against source values. `count` is 0 where they are the same by construction."""

    count: int = 0
    signal: float = 0.0  # sum of squares of the source
    noise: float = 0.0  # sum of squares of the difference
    amax_noise: float = 0.0  # what the noise would be with the scales of rule amax
    max_abs_error: float = 0.0
    zeroed: int = 0  # weights that are not 0 and became 0
    nonfinite: int = 0  # weights that were set to 0 on request

    def add(
        self, count: int, signal: float, noise: float, max_abs_error: float, zeroed: int, amax_noise: float = 0.0
    ) -> None:
        """Count one slice of `count` weights."""
        self.count += count
        self.signal += signal
        self.noise += noise
        self.amax_noise += amax_noise
        self.max_abs_error = max(self.max_abs_error, max_abs_error)
        self.zeroed += zeroed

    def add_values(self, source: NDArray[np.float32], stored: NDArray[np.float32]) -> None:
        """Count one slice, both float32 of the same shape."""
        difference = stored.astype(np.float64) - source
        self.add(
            source.size,
            float(np.square(source, dtype=np.float64).sum()),
            float(np.square(difference).sum()),
            float(np.abs(difference).max(initial=0.0)),
            int(np.count_nonzero((stored == 0) & (source != 0))),
        )

    @property
    def relative_l2(self) -> float | None:
        """|stored - source| / |source|, Euclidean; None where something was made of nothing."""
        return relative(self.signal, self.noise)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise in dB; None where there is no noise."""
        return decibels(self.signal, self.noise)


@dataclass
class CodeUse:
    """How often each code magnitude and each power of two among the scales occurs; how far the scales reach."""

    codes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(e4m3.MAGNITUDES, np.uint64))
    exponents: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(EXPONENTS, np.uint64))  # of scales, biased
    scale_min: float = inf
    scale_max: float = 0.0

    def add_scales(self, scales: NDArray[Any]) -> None:
        """Count the scales of one slice: all above 0."""
        values = scales.astype(np.float32).reshape(-1)
        self.add_range(float(values.min()), float(values.max()))
        exponents = np.bincount(values.view(np.int32) >> FLOAT32_MANTISSA, minlength=EXPONENTS)
        self.exponents += exponents.astype(np.uint64)

    def add_range(self, least: float, largest: float) -> None:
        """Scales are no smaller and no larger than these."""
        self.scale_min = min(self.scale_min, least)
        self.scale_max = max(self.scale_max, largest)

    def merge(self, other: "CodeUse") -> None:
        """Add what another one counted."""
        self.codes += other.codes
        self.exponents += other.exponents
        self.add_range(other.scale_min, other.scale_max)

    @property
    def scales(self) -> dict[int, int]:
        """How many scales lie in [2^k, 2^(k+1)), by k; those below float32's normal range count as k = -127."""
        return {int(field) - 127: int(self.exponents[field]) for field in np.flatnonzero(self.exponents)}

    @property
    def subnormal_share(self) -> float:
        """Share of the codes that are subnormal: not 0, but below the smallest normal value."""
        total = int(self.codes.sum())
        return int(self.codes[1 : e4m3.SMALLEST_NORMAL_CODE].sum()) / total if total else 0.0


def relative(signal: float, noise: float) -> float | None:
    """Noise over signal as lengths; None if there is noise and no signal."""
    return (noise / signal) ** 0.5 if signal else None if noise else 0.0


def decibels(signal: float, noise: float) -> float | None:
    """Signal to noise in dB; None where either is 0."""
    return 10 * log10(signal / noise) if noise and signal else None
