"""A device that takes its time: what it was given ends later, in an order drawn by chance.

It promises no more than `mosaic.runtime.device` says. A kernel reads its slots until it ends, and may end long after
others have its results. From when a copy begins until it ends anything is where it goes; NaN codes here. What it reads
it reads last.
"""

import random
import threading
from collections import deque

import torch

from support.tiered import WatchedDevice, WatchedOps

NOTHING_YET = 0xFF  # NaN as a code, NaN as either scale


class Kernel:
    """Reads slots; they must be the same when it ends."""

    def __init__(self, held, slots):
        self._places = [(memory, slots) for memory in (held.codes, held.scales)]
        self._before = self._content()

    def _content(self):
        return [memory[slots].view(torch.uint8).clone() for memory, slots in self._places]

    @property
    def undisturbed(self):
        return all(map(torch.equal, self._before, self._content()))


class Kernels:
    """The moment when so many kernels have ended. Implements Fence."""

    def __init__(self, device, count):
        self._device, self._count = device, count

    def over(self):
        return self._device.ended >= self._count

    def wait(self):
        while not self.over():
            self._device.step()


class Copy:
    """One on its way. Implements Fence."""

    def __init__(self, device, number, source, target, after):
        self.number, self.target, self.after = number, target, after
        self._device, self._source = device, source
        self.begun = self._ended = False

    def begin(self):
        self.begun = True
        self.target.fill_(NOTHING_YET)

    def end(self):
        self.target.copy_(self._source)
        self._ended = True

    def over(self):
        self._device.go_on()
        return self._ended

    def wait(self):
        while not self._ended:
            self._device.step()


class LateOps(WatchedOps):
    """Every kernel that reads slots is noted."""

    def __init__(self, device):
        super().__init__(device.memory)
        self.device = device

    def apply(self, x, slots, held, outputs):
        self.device.launch(held, sorted({*slots.ravel().tolist()} - {-1}))
        super().apply(x, slots, held, outputs)


class LateDevice(WatchedDevice):
    """Something ends when somebody waits, and up to `pace` things at other calls; `wrong`: what should not have."""

    def __init__(self, seed=0, pace=2):
        super().__init__()
        self.ops = LateOps(self)
        self.wrong: list[str] = []
        self.held_up = self.overtaken = 0  # copies that had to wait for kernels; that ended after a later one
        self.ended = 0  # kernels
        self._launched = self._sent = 0
        self._running = deque[Kernel]()
        self._copies: list[Copy] = []
        self._draw, self._pace = random.Random(seed), pace
        self._lock = threading.RLock()

    def launch(self, held, slots):
        self.go_on()
        with self._lock:
            kernel = Kernel(held, slots)
            places = {held.codes[slot].data_ptr() for slot in slots}
            if any(copy.begun and copy.target.data_ptr() in places for copy in self._copies):
                self.wrong.append("a kernel began before what it reads is there")
            self._running.append(kernel)
            self._launched += 1

    def mix(self, held):
        """As a layer's mixer: a kernel that reads no slots; the caller does not wait."""
        with self._lock:
            self._running.append(Kernel(held, []))
            self._launched += 1

    def fence(self):
        self.go_on()
        return Kernels(self, self._launched)

    def upload(self, source, target, after):
        self.targets.append((self.memory.item(target), target.data_ptr()))
        with self._lock:
            self._sent += 1
            self.held_up += not after.over()
            copy = Copy(self, self._sent, source, target, after)
            self._copies.append(copy)
        return copy

    def step(self):
        """One thing ends, or a copy begins."""
        with self._lock:
            actions = [self._end_kernel] if self._running else []
            for copy in self._copies:
                if copy.begun:
                    actions.append(lambda copy=copy: self._end_copy(copy))
                elif copy.after.over():
                    actions.append(copy.begin)
            if actions:
                self._draw.choice(actions)()

    def go_on(self):
        """Time passes."""
        for _ in range(self._draw.randint(0, self._pace)):
            self.step()

    def _end_kernel(self):
        if not self._running.popleft().undisturbed:
            self.wrong.append("a slot was written to while a kernel read it")
        self.ended += 1

    def _end_copy(self, copy):
        copy.end()
        self.overtaken += any(other.number < copy.number for other in self._copies)
        self._copies.remove(copy)
