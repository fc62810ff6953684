"""Experts of a long prompt on their way past a device's kernels: one half of a buffer is filled, the other is used.

A long prompt has work for every expert of a layer, more than the host's CPU could do in the time of a copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.runtime.device import Device
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.experts.places import Place
from mosaic.runtime.experts.store import LayerExperts
from mosaic.runtime.experts.uploads import Upload, Uploads
from mosaic.runtime.weights import E4M3Matrix, Expert

HALVES = 2


class Streaming:
    """`buffer`: an even number of slots."""

    def __init__(self, device: Device, uploads: Uploads, buffer: ExpertSlots) -> None:
        self._device, self._uploads, self._buffer = device, uploads, buffer
        self._free = [device.fence()] * HALVES  # when a half may be written to
        self._half = 0
        self.nbytes = 0  # copied so far

    def fits(self, place: Place) -> bool:
        """Whether an expert is of the kind that the buffer is for."""
        return place.kind == self._buffer.kind

    def apply(
        self, x: Tensor, chosen: NDArray[np.int64], numbers: Sequence[int], source: LayerExperts, outputs: Tensor
    ) -> None:
        """Outputs [.., R, H] of the experts with these numbers for x [.., H], both on the device; others stay."""
        filled: _Half | None = None
        for group in source.arriving(numbers, chosen.shape[-2]) if numbers else ():
            sent: list[Upload] = []
            for part in _parts(group, len(self._buffer.codes) // HALVES):
                coming = self._fill(part, chosen)
                sent += coming.uploads
                if filled:
                    self._use(filled, x, outputs)
                filled = coming
            for upload in sent:  # its experts are let go with the group
                self._uploads.wait(upload)
        if filled:
            self._use(filled, x, outputs)

    def _fill(self, experts: Mapping[int, Expert], chosen: NDArray[np.int64]) -> "_Half":
        self._half = (self._half + 1) % HALVES
        first = self._half * len(self._buffer.codes) // HALVES
        slot_of = np.full(chosen.max() + 1, -1, np.int32)
        uploads = []
        for slot, (number, expert) in enumerate(experts.items(), first):
            slot_of[number] = slot
            target = self._buffer.codes[slot], self._buffer.scales[slot]
            uploads.append(self._uploads.send(_bytes(expert), target, self._free[self._half]))
            self.nbytes += sum(part.nbytes for part in target)
        return _Half(self._half, slot_of[chosen], uploads)

    def _use(self, filled: "_Half", x: Tensor, outputs: Tensor) -> None:
        for upload in filled.uploads:
            self._uploads.wait(upload)
            for fence in upload.fences:
                self._device.follow(fence)
        self._device.ops.apply(x, self._device.bring(torch.from_numpy(filled.slots)), self._buffer, outputs)
        self._free[filled.number] = self._device.fence()


class _Half:
    """A half of the buffer with experts on their way, and the slots [.., R] of those that were chosen."""

    def __init__(self, number: int, slots: NDArray[np.int32], uploads: Sequence[Upload]) -> None:
        self.number, self.slots, self.uploads = number, slots, uploads


def _parts(group: Mapping[int, Expert], most: int) -> Iterator[Mapping[int, Expert]]:
    """The group in parts of so many."""
    items = iter(group.items())
    while part := dict(islice(items, most)):
        yield part


def _bytes(expert: Expert) -> list[NDArray[np.uint8]]:
    """Codes and scales, in the order of `ExpertSlots`."""
    matrices = [matrix for matrix in (expert.gate, expert.up, expert.down) if isinstance(matrix, E4M3Matrix)]
    parts = [*(matrix.codes for matrix in matrices), *(matrix.scales for matrix in matrices)]
    return [part.reshape(-1).view(torch.uint8).numpy() for part in parts]
