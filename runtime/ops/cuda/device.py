"""A GPU as a device: streams, events and pinned memory of torch.

Operations go to the default stream, uploads to one of their own. The thread that gives it operations has its GPU as the
current one (`enter`), one thread at a time; uploads may come from any.
"""

import contextlib
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mosaic.runtime.device import BeginUpload, DeviceOps, Fence
from mosaic.runtime.device.measure import measure
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.home import Segment
from mosaic.runtime.ops.cuda.graphs import PLAIN_RUNS, Graph, Graphs
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
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outputs = segment(x, addend, states)
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it may not have begun, or be over
                    graph.capture_end()
                raise

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay


class Uploading:
    """Implements BeginUpload, on a stream of its own."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream = torch.cuda.Stream(place)
        self._one_at_a_time = threading.Lock()

    def __call__(self, source: Tensor, target: Tensor, after: Fence) -> Fence:
        """See BeginUpload."""
        assert isinstance(after, Event)
        torch.cuda.set_device(self._place)  # a thread begins with the first GPU
        with self._one_at_a_time, torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            return Event(self._stream, patient=True)


class CudaDevice:
    """Implements Device. `graphs` knows what is recorded."""

    def __init__(self, number: int) -> None:
        self.place = torch.device("cuda", number)
        torch.cuda.set_device(self.place)
        self.name = f"{self.place} ({torch.cuda.get_device_name(self.place)})"
        self.memory = Memory(self.place)
        self.ops: DeviceOps = CudaOps()
        self.graphs = Graphs(Recorder(self.place))
        self.upload: BeginUpload = Uploading(self.place)
        self._operations = torch.cuda.default_stream(self.place)

    def try_out(self) -> None:
        """Run a kernel and record one; what goes wrong with the kernel is raised, of the recording `graphs` knows."""
        x, gain = torch.ones(1, 16, device=self.place), torch.ones(16, device=self.place)

        def segment(x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> tuple[Tensor, ...]:
            return (self.ops.rms_norm(x, gain, 0.0, 0.0),)

        for _ in range(PLAIN_RUNS + 2):
            (found,) = self.run(segment, x, None, ())
            if not torch.equal(found, x):
                raise RuntimeError(f"a kernel gave {found.flatten()[0].item()} for 1")

    def enter(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.place)

    def run(
        self, segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]
    ) -> tuple[Tensor, ...]:
        """See Home. However it ends, this thread's stream is that of operations."""
        try:
            return self.graphs.run(segment, x, addend, states)
        except BaseException:
            torch.cuda.set_stream(self._operations)
            raise

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
