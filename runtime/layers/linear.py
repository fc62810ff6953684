"""A bias-free linear map, quantised or not."""

from torch import Tensor

from mosaic.runtime.ops import Ops
from mosaic.runtime.weights import Weight


class Linear:
    """x [.., K] -> [.., N] for a weight [N, K]."""

    def __init__(self, ops: Ops, weight: Weight) -> None:
        self._ops = ops
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes read per use."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._ops.linear(x, self.weight)
