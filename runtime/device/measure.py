"""What an expert costs on a device, measured: to be copied there, and to be computed there. A tier decides by both."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mosaic.runtime.device import Device
from mosaic.runtime.ops.cuda.slots import ExpertSlots

ROUNDS = 5  # of which the median counts
LAUNCHES = 16  # of a round: one alone is over before the clock can tell


@dataclass(frozen=True)
class ExpertCosts:
    """Nanoseconds of one expert: `copy` into a slot, `compute` there for one token."""

    copy: int
    compute: int


def measure(device: Device, held: ExpertSlots, ranks: int) -> ExpertCosts:
    """With slots of which nothing is needed any more. `ranks`: experts of a token, which are computed together."""
    return ExpertCosts(_copy(device, held), _compute(device, held, ranks))


def _copy(device: Device, held: ExpertSlots) -> int:
    targets = [part[0].view(torch.uint8) for part in (held.codes, held.scales)]
    sources = [device.staging(target.nbytes).zero_() for target in targets]

    def copy() -> None:
        fences = [device.upload(*pair, device.fence()) for pair in zip(sources, targets, strict=True)]
        for fence in fences:
            fence.wait()

    return _median(copy)


def _compute(device: Device, held: ExpertSlots, ranks: int) -> int:
    """Of slots in turn: none is to be in the device's caches still."""
    turns = torch.arange(LAUNCHES * ranks, dtype=torch.int32).view(LAUNCHES, 1, ranks) % len(held.codes)
    slots, x = device.bring(turns), device.bring(torch.zeros(1, held.hidden))
    outputs = device.bring(torch.zeros(1, ranks, held.hidden))

    def compute() -> None:
        for places in slots:
            device.ops.apply(x, places, held, outputs)
        device.fence().wait()

    return _median(compute) // (LAUNCHES * ranks)


def _median(work: Callable[[], None]) -> int:
    """Nanoseconds of some work, which is done once before."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start)
    return int(statistics.median(times[1:]))
