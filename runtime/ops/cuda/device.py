"""A GPU as a device: streams, events and pinned memory of torch.

Operations go to the default stream, uploads to one of their own. Whoever finds a GPU makes it the current one of its
thread, and gives it operations from that thread alone; only uploads may come from others.
"""

import importlib.util
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mosaic.format.errors import InputError
from mosaic.runtime.device import DeviceOps, Fence
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.home import Segment
from mosaic.runtime.ops.cuda.graphs import Graph, Graphs
from mosaic.runtime.state import LayerState

OLDEST = (7, 5)  # compute capability that the kernels are compiled for


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

    def __init__(self, number: int, ops: DeviceOps) -> None:
        self.place = torch.device("cuda", number)
        torch.cuda.set_device(self.place)
        self.name = f"{self.place} ({torch.cuda.get_device_name(self.place)})"
        self.memory = Memory(self.place)
        self.ops = ops
        self.graphs = Graphs(Recorder(self.place))
        self.run = self.graphs.run
        self._operations = torch.cuda.default_stream(self.place)
        self._uploads = torch.cuda.Stream(self.place)
        self._uploading = threading.Lock()

    def free(self) -> int:
        """See Device. What the driver has, and what torch keeps from it without a tensor in it."""
        free, _ = torch.cuda.mem_get_info(self.place)
        return free + torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)

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


def find(number: int | None) -> CudaDevice:
    """The GPU of a number, or the first one. InputError if it cannot be used."""
    without = "or run on the CPU alone: --device cpu"
    if torch.version.cuda is None:
        found = f"torch {torch.__version__}"
        remedy = f"install a torch that was built with CUDA (pytorch.org says how), {without}"
        raise InputError("this torch cannot use GPUs", found=found, expected="a build with CUDA", remedy=remedy)
    if not importlib.util.find_spec("triton"):
        remedy = f'pip install "mosaic-moe[gpu]", {without}'
        raise InputError("the kernels for GPUs need triton, which is not installed", remedy=remedy)
    count, number = torch.cuda.device_count(), number or 0
    if not count:
        remedy = f"see what nvidia-smi says about the driver, and whether CUDA_VISIBLE_DEVICES hides the GPU, {without}"
        raise InputError("no GPU can be used", found="none that CUDA sees", remedy=remedy)
    if number >= count:
        numbers = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError("there is no such GPU", found=f"cuda:{number}", expected=numbers, remedy="choose one of these")
    capability = torch.cuda.get_device_capability(number)
    if capability < OLDEST:
        found = f"{torch.cuda.get_device_name(number)}: {capability[0]}.{capability[1]}"
        remedy = f"use a newer GPU (Turing or later), {without}"
        raise InputError("this GPU is too old", found=found, expected="compute capability 7.5 or more", remedy=remedy)
    from mosaic.runtime.ops.cuda.ops import CudaOps  # without triton it cannot be imported

    return CudaDevice(number, CudaOps())
