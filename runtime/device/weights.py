"""The weights of the part of a model that a device has: copied there as they are asked for."""

from collections.abc import Callable, Sequence

from torch import Tensor

from mosaic.format.spec import ModelSpec
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.weights import E4M3Matrix, ModelWeights, Weight

DENSE, HEAD = "dense weights", "head"  # the plan's names: of decoder layers, and of what is outside of them


class DeviceWeights:
    """Implements ModelWeights. A tensor is copied each time it is asked for, which models do once."""

    def __init__(self, weights: ModelWeights, memory: Memory) -> None:
        self._weights = weights
        self._memory = memory

    @property
    def spec(self) -> ModelSpec:
        """See ModelWeights."""
        return self._weights.spec

    @property
    def dtypes(self) -> tuple[str, ...]:
        """See ModelWeights."""
        return self._weights.dtypes

    def tensor(self, key: str) -> Tensor:
        """See ModelWeights."""
        return self._put(key, self._weights.tensor(key))

    def matrix(self, key: str) -> Weight:
        """See ModelWeights."""
        weight = self._weights.matrix(key)
        if isinstance(weight, E4M3Matrix):
            return E4M3Matrix(self._put(key, weight.codes), self._put(key, weight.scales))
        return self._put(key, weight)

    def _put(self, key: str, tensor: Tensor) -> Tensor:
        return self._memory.put(DENSE if key.startswith("layers.") else HEAD, tensor)

    def rows(self, key: str) -> Callable[[Sequence[int]], Tensor]:
        """See ModelWeights. They are looked up on the host."""
        return self._weights.rows(key)

    def read_ahead(self, prefix: str) -> None:
        """See ModelWeights."""
        self._weights.read_ahead(prefix)

    def release(self, prefix: str) -> None:
        """See ModelWeights."""
        self._weights.release(prefix)
