"""Comparing float64 results with float64 numpy.

Tolerance. Everything is float64, on both sides. An elementwise formula takes some ten roundings of 2^-53 per side, a
mean of at most 48 terms as many again: REL = 2^-46 relative covers 128 of them. Where terms cancel there remains an
absolute noise of 2^-53 per term of the sum of the terms' sizes; `noise` states it per operation. Both are many orders
below one rounding to float32 (2^-24), so a float32 step anywhere in between fails.
"""

import numpy as np
import torch

EPS = 2.0**-53
REL = 128 * EPS
SMALLEST = 2.0**-1074  # subnormal results are rounded to a multiple of this


def f64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def near(found: torch.Tensor, expected: np.ndarray, noise: np.ndarray | float = 0.0) -> None:
    """`expected` up to some roundings of float64 and `noise`."""
    assert found.dtype == torch.float64
    assert tuple(found.shape) == expected.shape
    error = np.abs(f64(found) - expected)
    bound = REL * np.abs(expected) + 4 * SMALLEST + noise
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{error[worst]} > {bound if np.ndim(bound) == 0 else bound[worst]} at {worst}"


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)
