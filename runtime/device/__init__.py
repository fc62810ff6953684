"""A device: a second place that computes, with memory of its own, to which bytes have to be brought. Usually a GPU.

`host` is one whose memory is that of this process: so everything about tiers runs without a GPU. The real one is
`mosaic.runtime.ops.cuda.device`. This package holds what knows of no kind of device.
"""

from typing import Protocol

import torch
from torch import Tensor

from mosaic.runtime.device.memory import Memory
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.home import Run
from mosaic.runtime.ops import Ops


class Fence(Protocol):
    """A moment in what a device does, which comes when all that it was given before is done."""

    def over(self) -> bool:
        """Whether it has come."""

    def wait(self) -> None:
        """Until it has come."""


class DeviceOps(Ops, Protocol):
    """Operations whose tensors are on a device, experts in slots among them."""

    def apply(self, x: Tensor, slots: Tensor, held: ExpertSlots, outputs: Tensor) -> None:
        """Outputs [.., R, H] of the experts in slots [.., R] (int32; -1: they stay as they are) for x [.., H]."""

    def add_outputs(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Sum over R of outputs [.., R, H] by weights [.., R], in their order: [.., H]."""


class BeginUpload(Protocol):
    """Begins copies from `staging` memory; holds nothing of the device but what that takes."""

    def __call__(self, source: Tensor, target: Tensor, after: Fence) -> Fence:
        """Copy to memory of the device once `after` is over; when that is done. Any thread may ask."""


class Device(Protocol):
    """`name` is for people; `place` is where its tensors are; `memory` is what is taken for good.

    Operations are begun in the order in which they are given, and nobody waits for them; uploads go on beside them.
    """

    name: str
    place: torch.device
    memory: Memory
    ops: DeviceOps

    @property
    def run(self) -> Run:
        """Runs what is between two layers' experts."""

    @property
    def upload(self) -> BeginUpload:
        """How bytes come to it beside operations."""

    def enter(self) -> None:
        """Operations will come from this thread."""

    def free(self) -> int:
        """Bytes of its memory that can be had."""

    def measure(self, held: ExpertSlots) -> tuple[float, float]:
        """Seconds to copy an expert into a slot, and to compute one for a token. Writes to slots."""

    def staging(self, nbytes: int) -> Tensor:
        """Memory of the host from which it can copy: uint8 [nbytes]."""

    def fence(self) -> Fence:
        """The moment when all that operations were given until now is done."""

    def follow(self, fence: Fence) -> None:
        """What operations are given from now on begins when a moment has come. The caller does not wait."""

    def bring(self, x: Tensor) -> Tensor:
        """A copy of a tensor of the host; one that is there already itself."""

    def fetch(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host. Waits for them."""
