"""RMSNorm."""

from torch import Tensor

from mosaic.runtime.ops import Ops


class RmsNorm:
    """x / rms(x) * (offset + weight) over the last axis; `offset` is 1 where weights are stored zero-centred."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float, offset: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps
        self._offset = offset

    def added(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """X + y, and that normalised."""
        return self._ops.add_rms_norm(x, y, self._weight, self._eps, self._offset)

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised x."""
        return self._ops.rms_norm(x, self._weight, self._eps, self._offset)
