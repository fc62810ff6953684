"""A device that is none: its memory is the host's, and the CPU's kernels are its operations.

With it a model gives the same bits as without, since they are the same kernels: so tiers are tested without a GPU.
"""

import numpy as np
import torch
from torch import Tensor

from mosaic.runtime.device import Fence
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.home import Run, plainly
from mosaic.runtime.machine import free_memory
from mosaic.runtime.ops.cpu import Activations, CpuOps


class Over:
    """A moment that has come."""

    def over(self) -> bool:
        """See Fence."""
        return True

    def wait(self) -> None:
        """See Fence."""


class HostOps(CpuOps):
    """Implements DeviceOps."""

    def apply(self, x: Tensor, slots: Tensor, held: ExpertSlots, outputs: Tensor) -> None:
        """See DeviceOps."""
        used, places = np.unique(slots.numpy(), return_inverse=True)
        absent = int(used[0] < 0)
        experts = [held.experts[slot] for slot in used[absent:]]
        self.apply_experts(x, (places.reshape(slots.shape) - absent).astype(np.int32), experts, outputs)


class HostDevice:
    """Implements Device."""

    def __init__(self, activations: Activations = Activations.F32, room: int | None = None) -> None:
        self.name = "the host's memory"
        self.place = torch.device("cpu")
        self.memory = Memory(self.place)
        self.ops = HostOps(activations)
        self.run: Run = plainly
        self._room = room

    def enter(self) -> None:
        """See Device. Any thread may."""

    def free(self) -> int:
        """See Device. What was said to be there, or what the host has."""
        return free_memory() if self._room is None else self._room - sum(self.memory.used.values())

    def measure(self, held: ExpertSlots) -> tuple[float, float]:
        """See Device. Both are for nothing, so that slots are used as much as can be."""
        return 0.0, 0.0

    def staging(self, nbytes: int) -> Tensor:
        """See Device."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def fence(self) -> Fence:
        """See Device."""
        return Over()

    @staticmethod
    def upload(source: Tensor, target: Tensor, after: Fence) -> Fence:
        """See BeginUpload. Done when it returns."""
        after.wait()
        target.copy_(source)
        return Over()

    def follow(self, fence: Fence) -> None:
        """See Device."""
        fence.wait()

    def bring(self, x: Tensor) -> Tensor:
        """See Device."""
        return x

    def fetch(self, *tensors: Tensor) -> list[Tensor]:
        """See Device."""
        return list(tensors)
