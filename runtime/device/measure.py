"""What an expert costs on a device: to be copied there, and to be computed there. A tier decides by both."""

import statistics
import time
from collections.abc import Callable

import torch

from mosaic.runtime.device import Device
from mosaic.runtime.experts.expert_slots import ExpertSlots

ROUNDS = 5  # of which the median counts
LAUNCHES = 16  # of a round: one alone is over before the clock can tell
TOGETHER = 8  # experts of a launch: those of a token


def measure(device: Device, held: ExpertSlots) -> tuple[float, float]:
    """See Device.measure. Takes some milliseconds."""
    return _copy(device, held), _compute(device, held)


def _copy(device: Device, held: ExpertSlots) -> float:
    targets = [part[0].view(torch.uint8) for part in (held.codes, held.scales)]
    sources = [device.staging(target.nbytes).zero_() for target in targets]

    def copy() -> None:
        fences = [device.upload(*pair, device.fence()) for pair in zip(sources, targets, strict=True)]
        for fence in fences:
            fence.wait()

    return _seconds(copy)


def _compute(device: Device, held: ExpertSlots) -> float:
    """Of slots in turn: none is to be in the device's caches still."""
    turns = torch.arange(LAUNCHES * TOGETHER, dtype=torch.int32).view(LAUNCHES, 1, TOGETHER) % len(held.codes)
    slots, x = device.bring(turns), device.bring(torch.zeros(1, held.hidden))
    outputs = device.bring(torch.zeros(1, TOGETHER, held.hidden))

    def compute() -> None:
        for places in slots:
            device.ops.apply(x, places, held, outputs)
        device.fence().wait()

    return _seconds(compute) / (LAUNCHES * TOGETHER)


def _seconds(work: Callable[[], None]) -> float:
    """Of some work, which is done once before."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
