"""CUDA graphs of what is between two layers' experts: in decoding, one launch instead of some thirty.

A recording holds addresses and no decision of the host. So what a segment is given is copied to where the recording
expects it, a sequence's memory is part of what a recording is known by, and whatever changes from token to token (how
many there are, which pages hold them) has to be read from the device's memory.

How it is recorded is not decided here (`device.Recorder`): tests record without a GPU.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from mosaic.runtime.device.states import DeviceCache, DeviceDelta
from mosaic.runtime.home import Segment
from mosaic.runtime.state import LayerState

MOST = 320  # recordings: of 40 layers for eight companies of sequences
PLAIN_RUNS = 2  # before a segment is recorded: kernels are compiled by then
COMPANY_RUNS = 16  # the same for several sequences: not every company lasts

Graph = Callable[[], tuple[Tensor, ...]]  # begins what was recorded; the outputs are the same tensors every time


class Record(Protocol):
    """Records segments."""

    def __call__(self, segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> Graph:
        """What a segment does with these tensors, and with the memory of these states; it is not done yet.

        RuntimeError if it cannot be recorded.
        """


class _Known:
    """A segment with one company of sequences: its inputs' place, how often it ran, and its recording."""

    def __init__(self, x: Tensor, addend: Tensor | None) -> None:
        self._x = torch.empty_like(x)
        self._addend = None if addend is None else torch.empty_like(addend)
        self.plain_runs = 0
        self.graph: Graph | None = None

    def take(self, x: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The inputs, at their place."""
        self._x.copy_(x)
        if self._addend is not None and addend is not None:
            self._addend.copy_(addend)
        return self._x, self._addend


class Graphs:
    """Implements `home.Run`: outputs of a segment are good until it runs again with the same sequences' memory.

    At most `most` recordings are kept, the latest used. `note`: why no more are made, if one failed.
    """

    def __init__(self, record: Record, most: int = MOST) -> None:
        self.note = ""
        self._record = record
        self._most = most
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()

    def run(
        self, segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]
    ) -> tuple[Tensor, ...]:
        """See `home.Home`. Prompts are run as they are written."""
        if x.shape[-2] > 1:
            return segment(x, addend, states)
        known = self._find(segment, x, addend, states)
        x, addend = known.take(x, addend)
        enough = PLAIN_RUNS if len(states) < 2 else COMPANY_RUNS
        if known.graph is None and known.plain_runs >= enough and not self.note:
            try:
                known.graph = self._record(segment, x, addend, states)
            except RuntimeError as error:
                self.note = f"CUDA graphs are not used, so answers take longer: {error}"
                warnings.warn(self.note, stacklevel=2)
        if known.graph is not None:
            return known.graph()
        known.plain_runs += 1
        return segment(x, addend, states)

    def _find(self, segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> _Known:
        addresses = tuple(state.address for state in cast(Sequence[DeviceCache | DeviceDelta], states))
        key = segment, x.shape, addend is None, addresses
        known = self._known.pop(key, None) or _Known(x, addend)
        self._known[key] = known
        if len(self._known) > self._most:
            self._known.popitem(last=False)  # its last run is over: the host waited for the experts since then
        return known
