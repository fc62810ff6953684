"""A GPU as a device: streams, events and pinned memory of torch.

Operations go to the default stream, uploads to one of their own. The thread that makes a CudaDevice has its GPU as the
current one from then on, and alone gives it operations; only uploads may come from others.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mosaic.runtime.device import DeviceOps, Fence
from mosaic.runtime.device.measure import measure
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.home import Run, Segment
from mosaic.runtime.ops.cuda.graphs import Graph, Graphs
from mosaic.runtime.ops.cuda.ops import CudaOps
from mosaic.runtime.state import LayerState


class Event:
    """Implements Fence: a moment in a stream. `patient`: who waits for it sleeps instead of asking on and on."""

    def __init__(self, stream: torch.cuda.Stream, *, patient: bool = False) -> None:
        self.event = torch.cuda.Event(blocking=patient)
        self.event.record(stream)

    def over(self) -> bool:
        """See Fence."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Fence."""
        self.event.synchronize()


class Recorder:
    """Implements `graphs.Record`. Recordings share one pool of memory: all but their outputs lies in the same place."""

    def __init__(self, place: torch.device) -> None:
        self._stream = torch.cuda.Stream(place)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> Graph:
        """See Record. Other threads go on uploading meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = segment(x, addend, states)
            finally:
                graph.capture_end()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay


class CudaDevice:
    """Implements Device. `graphs` knows what is recorded."""

    def __init__(self, number: int) -> None:
        self.place = torch.device("cuda", number)
        torch.cuda.set_device(self.place)
        self.name = f"{self.place} ({torch.cuda.get_device_name(self.place)})"
        self.memory = Memory(self.place)
        self.ops: DeviceOps = CudaOps()
        self.graphs = Graphs(Recorder(self.place))
        self.run: Run = self.graphs.run
        self._operations = torch.cuda.default_stream(self.place)
        self._uploads = torch.cuda.Stream(self.place)
        self._uploading = threading.Lock()

    def free(self) -> int:
        """See Device. What the driver has, and what torch keeps from it without a tensor in it."""
        free, _ = torch.cuda.mem_get_info(self.place)
        return free + torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)

    def measure(self, held: ExpertSlots) -> tuple[float, float]:
        """See Device."""
        return measure(self, held)

    def staging(self, nbytes: int) -> Tensor:
        """See Device."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def fence(self) -> Fence:
        """See Device."""
        return Event(self._operations)

    def upload(self, source: Tensor, target: Tensor, after: Fence) -> Fence:
        """See Device."""
        assert isinstance(after, Event)
        with self._uploading, torch.cuda.stream(self._uploads):
            self._uploads.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            return Event(self._uploads, patient=True)

    def follow(self, fence: Fence) -> None:
        """See Device."""
        assert isinstance(fence, Event)
        self._operations.wait_event(fence.event)

    def bring(self, x: Tensor) -> Tensor:
        """See Device. By way of pinned memory, which torch keeps until the copy is made: the caller does not wait."""
        if x.device == self.place:
            return x
        return _pinned(x).copy_(x).to(self.place, non_blocking=True)

    def fetch(self, *tensors: Tensor) -> list[Tensor]:
        """See Device."""
        copies = [_pinned(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
        self.fence().wait()
        return copies


def _pinned(like: Tensor) -> Tensor:
    """Pinned memory of the host with anything in it; torch keeps what was given back for the next one."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
