"""Types of the C++ extension, for mypy and editors. The behaviour is defined in native/src, not here."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# Below Python 3.12 numpy does not declare its arrays as Buffer; there mypy also checks their dtype.
_Codes = NDArray[np.uint8] | Buffer
_Values = NDArray[np.float32] | Buffer
_Bits = NDArray[np.uint16] | Buffer
_Counts = NDArray[np.uint64] | Buffer

def isas() -> tuple[str, ...]:
    """The instruction sets compiled in and supported by this CPU, slowest first."""

def isa() -> str:
    """The active instruction set: the fastest supported one, or the one that MOSAIC_ISA names."""

def e4m3_decode(codes: _Codes, out: _Values, isa: str = "") -> None:
    """Decode E4M3 codes (uint8) into float32, exactly; 0x7F and 0xFF become NaN."""

def e4m3_encode(values: _Values, out: _Codes, isa: str = "") -> None:
    """Encode float32 into E4M3 codes (uint8): nearest, ties to even, saturating; NaN becomes 0x7F or 0xFF."""

def e4m3_count(codes: _Codes, counts: _Counts, isa: str = "") -> None:
    """Add to counts (128 times uint64) how often each magnitude of E4M3 codes (uint8), the sign off, occurs."""

def e4m3_quantize(
    weights: _Values | _Bits,
    codes: _Codes,
    scales: _Bits,
    counts: _Counts,
    exponents: _Counts,
    limit: float,
    candidates: int = 1,
    step: int = 1,
    isa: str = "",
) -> tuple[float, float, float, int, float, float, float] | None:
    """Quantise weights [N, K]: float32, or bfloat16 as uint16; whole 128x128 blocks.

    Codes are uint8, scales bfloat16 as uint16: by rule amax, or the least noise of `candidates` scales from that of
    rule amax upwards, `step` bfloat16 values apart. Adds to `counts` (128 times uint64) how often each magnitude
    occurs, and to `exponents` (256 times uint64) how often each biased exponent of a scale does. Returns (sum of
    squares, sum of squared errors, largest error, weights that became 0, sum of squared errors by rule amax, least
    scale, largest scale), or None if a magnitude is above `limit` or not a number: what was written then means
    nothing, and nothing is added.
    """
