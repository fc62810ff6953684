"""Running error analysis of float32: a kernel's formula, evaluated in float64 with a bound on what float32 makes of it.

Every operation adds what its own rounding may be to what its operands bring along (Wilkinson). UNIT = 2^-24 is half a
unit in the last place; a sum of n terms, in any order, is off by n UNIT of the sum of their sizes; a fused multiply-add
rounds less than both of its operations. GPUs approximate: division up to 2 units in the last place (4 UNIT), exp is
2^(x log2 e), off by 2 |x| UNIT for the argument and 2 units in the last place, and tensor cores cut off instead of
rounding, twice UNIT. The float64 of all this is off by 2^-53 per operation, which is not counted.
"""

import numpy as np

UNIT = 2.0**-24
SMALLEST = 2.0**-126  # below it float32 is spaced absolutely, or 0


class Rounded:
    """A value (float64), and how far float32's may be from it; arrays, broadcast as usual."""

    def __init__(self, value, error=0.0):
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)

    def _rounded(self, value, error, units=1):
        return Rounded(value, error + units * UNIT * (np.abs(value) + error) + SMALLEST)

    def __getitem__(self, place):
        return Rounded(self.value[place], self.error[place])

    def __add__(self, other):
        other = exact(other)
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        return self + -exact(other)

    def __neg__(self):
        return Rounded(-self.value, self.error)

    def __mul__(self, other):
        other = exact(other)
        sizes = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return self._rounded(self.value * other.value, sizes + self.error * other.error)

    def reciprocal(self):
        least = np.abs(self.value) - self.error
        assert (least > 0).all()
        return self._rounded(1 / self.value, self.error / (np.abs(self.value) * least), 4)

    def inverse_root(self):
        """1 / sqrt of what is positive; both operations round to the nearest."""
        least = self.value - self.error
        assert (least > 0).all()
        return self._rounded(self.value**-0.5, least**-0.5 - self.value**-0.5, 3)

    def sum(self, axis, units=1):
        terms = self.value.shape[axis] * units
        sizes = (np.abs(self.value) + self.error).sum(axis)
        return self._rounded(self.value.sum(axis), self.error.sum(axis) + terms * UNIT * sizes)

    def exp(self):
        value, off = np.exp(self.value), self.error + (2 * np.abs(self.value) + 6) * UNIT
        return Rounded(value, np.exp(self.value + off) - value + SMALLEST)

    def sigmoid(self):
        """1 / (1 + exp(-x)), of which no relative error is larger than that of exp, and three roundings."""
        value = 1 / (1 + np.exp(-self.value))
        return Rounded(value, value * np.expm1(self.error + (2 * np.abs(self.value) + 14) * UNIT) + SMALLEST)

    def silu(self):
        return self * self.sigmoid()

    def dot(self, matrix, units=1, more=2):
        """Times an exact matrix [N, K] transposed: of the last axis. `more` roundings of each product."""
        weights = np.abs(matrix)
        terms = self.value.shape[-1] * units + more
        sizes = (np.abs(self.value) + self.error) @ weights.T
        return self._rounded(self.value @ matrix.T, self.error @ weights.T + terms * UNIT * sizes)

    def __matmul__(self, other):
        """Of the last two axes, as usual; terms may be added up in any order."""
        other = exact(other)
        sizes = np.abs(self.value), np.abs(other.value)
        error = sizes[0] @ other.error + self.error @ sizes[1] + self.error @ other.error
        terms = self.value.shape[-1] * UNIT * ((sizes[0] + self.error) @ (sizes[1] + other.error))
        return self._rounded(self.value @ other.value, error + terms)

    def shaped(self, *shape):
        return Rounded(self.value.reshape(shape), self.error.reshape(shape))

    def swapped(self):
        """The first two axes exchanged."""
        return Rounded(self.value.swapaxes(0, 1), self.error.swapaxes(0, 1))

    @staticmethod
    def stack(parts):
        return Rounded(np.stack([part.value for part in parts]), np.stack([part.error for part in parts]))

    def holds(self, found):
        """Assert that float32 results are within the bound, and that they are float32."""
        found = found.cpu()
        assert str(found.dtype) == "torch.float32"
        values = found.double().numpy()
        assert values.shape == self.value.shape, (values.shape, self.value.shape)
        excess = np.abs(values - self.value) - self.error
        worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
        assert excess[worst] <= 0, f"{values[worst]} is not {self.value[worst]} +- {self.error[worst]} at {worst}"

    def agrees(self, reference):
        """Assert that the formula is that of a float64 reference: far below any float32 rounding."""
        expected = reference.double().numpy()
        assert np.allclose(self.value, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def exact(value):
    """As it is, if it is one already."""
    return value if isinstance(value, Rounded) else Rounded(value)
