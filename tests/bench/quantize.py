"""Speed of the native quantiser alone, on one thread, in cache: GB/s of BF16 read, by ISA and scale rule."""

import statistics
import time

import numpy as np

from mosaic import _native
from mosaic.convert.sums import EXPONENTS
from mosaic.format import e4m3

SHAPE = (512, 2048)
REPETITIONS = 31


def main() -> None:
    """Print one line per ISA and kernel."""
    weights = (np.random.default_rng(0).standard_normal(SHAPE) * 0.02).astype(e4m3.BFLOAT16).view(np.uint16)
    codes, scales = np.empty(SHAPE, np.uint8), np.empty(e4m3.grid(SHAPE), np.uint16)
    counts, exponents = np.zeros(e4m3.MAGNITUDES, np.uint64), np.zeros(EXPONENTS, np.uint64)

    def quantize(candidates: int, isa: str) -> None:
        arguments = (weights, codes, scales, counts, exponents, e4m3.LARGEST_WEIGHT, candidates, e4m3.MSE_STEP, isa)
        _native.e4m3_quantize(*arguments)

    kernels = {
        "quantize, amax": lambda isa: quantize(1, isa),
        "quantize, mse": lambda isa: quantize(e4m3.MSE_CANDIDATES, isa),
        "count codes": lambda isa: _native.e4m3_count(codes, counts, isa),
    }
    print(f"{'':<16}{'isa':<8}{'G weights/s':>12}{'GB/s of BF16':>14}{'fastest':>9}")
    for name, kernel in kernels.items():
        for isa in _native.isas():
            kernel(isa)
            seconds = []
            for _ in range(REPETITIONS):
                start = time.perf_counter()
                kernel(isa)
                seconds.append(time.perf_counter() - start)
            speeds = [weights.size / time / 1e9 for time in (statistics.median(seconds), min(seconds))]
            print(f"{name:<16}{isa:<8}{speeds[0]:>12.3f}{2 * speeds[0]:>14.2f}{2 * speeds[1]:>9.2f}")


if __name__ == "__main__":
    main()
