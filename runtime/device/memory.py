"""What is taken of a device's memory for good, counted to the byte by what it is for.

Weights, slots, keys and values, states: all of it is taken when a model is loaded, and goes with the model. What
operations need for a while is theirs to take.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Memory:
    """Of one device; `used` has the bytes of each item, by the names of a `VramPlan`."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._used = Counter[str]()

    @property
    def used(self) -> Mapping[str, int]:
        """Bytes by item."""
        return dict(self._used)

    @torch.inference_mode(False)  # it is written to inside and outside of it
    def empty(self, item: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory with anything in it."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._place)
        self._used[item] += tensor.nbytes
        return tensor

    def put(self, item: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor."""
        return self.empty(item, tensor.shape, tensor.dtype).copy_(tensor)
