"""Where the check runs: on a card, or, to rehearse it, on a device that is none.

Both are used by the same code. A rehearsal proves that this code runs; its figures mean nothing.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from device.lines import Report
from mosaic.runtime import loading
from mosaic.runtime.device import Device
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.ops.cuda.find import find_gpu
from mosaic.runtime.speeds import Speeds

ROUNDS = 9  # of which the median counts
WARM = 0.2  # seconds before them, for clocks to rise and what is made once to be made

Work = Callable[[], object]


class Card(Protocol):
    """`cache`: bytes of its last cache. `rehearsed`: nothing is measured. `errors`: what a kernel may end in."""

    rehearsed: bool
    cache: int
    errors: tuple[type[Exception], ...]

    def device(self) -> Device:
        """With nothing in its memory."""

    def trouble(self, device: Device) -> str:
        """What a device could not do as it should, and did otherwise."""

    def recorded(self, work: Work) -> Work:
        """The same work with as little as can be left to the host."""

    def seconds(self, work: Work) -> float:
        """Of some work that was begun, by the clock of whoever does it."""


def eager(device: Device) -> Device:
    """The same, but a tier is told that copies and the card's time cost nothing: it copies all that it has room for."""
    device.measure = lambda held: (0.0, 0.0)  # type: ignore[method-assign]
    return device


@contextmanager
def attempt(card: Card, report: Report, what: str) -> Iterator[None]:
    """What goes wrong on the card is a line, with its traceback on standard error, and no end."""
    try:
        yield
    except card.errors as error:
        traceback.print_exc()
        report.add(what, 0, "", passed=False, note=f"{type(error).__name__}: {str(error).splitlines()[0]}")


class Gpu:
    """Implements Card: the first NVIDIA GPU. InputError if it cannot be used."""

    rehearsed = False

    def __init__(self) -> None:
        from triton import TritonError  # where there is no card there need not be a triton

        self.errors = (RuntimeError, TritonError)
        self.cache = int(torch.cuda.get_device_properties(find_gpu(None).place).L2_cache_size)

    def device(self) -> Device:
        """See Card. Earlier ones have given back theirs."""
        gc.collect()
        return find_gpu(None)

    def trouble(self, device: Device) -> str:
        """See Card."""
        return str(device.graphs.note)  # type: ignore[attr-defined]  # only a CudaDevice comes here

    def recorded(self, work: Work) -> Work:
        """See Card. As a CUDA graph: launching a kernel takes the host longer than some kernels take."""
        work()  # kernels are compiled, memory is there
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, work: Work) -> float:
        """See Card. By events of the stream that operations go to."""
        warm = time.monotonic() + WARM
        while time.monotonic() < warm:
            work()
            torch.cuda.synchronize()
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)


class Rehearsal:
    """Implements Card: the host's memory, the CPU's kernels."""

    rehearsed = True
    cache = 1 << 12
    errors = (RuntimeError,)

    def __init__(self) -> None:
        loading.speeds = lambda file, span, threads: Speeds(1e10, 1e9)  # instead of some seconds of measuring

    def device(self) -> Device:
        """See Card."""
        return HostDevice()

    def trouble(self, device: Device) -> str:
        """See Card."""
        return ""

    def recorded(self, work: Work) -> Work:
        """See Card."""
        return work

    def seconds(self, work: Work) -> float:
        """See Card. Once: it is no figure anyway."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
