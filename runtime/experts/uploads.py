"""Bytes on their way to a device: threads copy them into a ring of staging buffers, and from there the device copies.

Moves bytes, beside everything else. What goes where, and what follows from its being there, is the caller's to know.
A device copies at full speed, and beside its operations, only from `Device.staging` memory; experts lie elsewhere.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.runtime.device import BeginUpload, Device, Fence
from mosaic.runtime.experts.promotion import RING

THREADS = 2  # that fill buffers


class Upload:
    """One source on its way to its targets. Once it is staged, `fences` are of the device's copies, one per target."""

    def __init__(self, source: Sequence[NDArray[np.uint8]], target: Sequence[Tensor], after: Fence) -> None:
        self.source = source
        self.target = target
        self.after = after
        self.fences: list[Fence] = []
        self._staged = threading.Event()  # or failed, or given up: no thread has anything to do with it any more


class Uploads:
    """`nbytes`: of the largest upload; there are so many `buffers` of this size, and `threads` that fill them.

    For one thread, the main one. Ends when nobody holds it, if it was not closed.
    """

    def __init__(self, device: Device, nbytes: int, buffers: int = RING, threads: int = THREADS) -> None:
        self._nbytes = nbytes
        self._ring = _Ring(device.upload, [_Buffer(device.staging(nbytes)) for _ in range(buffers)], threads)
        weakref.finalize(self, self._ring.close)
        self._ring.begin()

    def send(self, source: Sequence[NDArray[np.uint8]], target: Sequence[Tensor], after: Fence) -> Upload:
        """Bring the bytes of a source, one part after another, into the targets, as soon as a buffer is free.

        Parts and targets are [n] and contiguous, targets of any dtype; none is written to before `after` is over. The
        caller does not wait.
        """
        upload = Upload(source, target, after)
        found, room = sum(part.nbytes for part in source), sum(part.nbytes for part in target)
        if found != room or found > self._nbytes:
            raise ValueError(f"{found} bytes for {room}, through a buffer of {self._nbytes}")
        if self._ring.closed:
            raise ValueError("closed")
        self._ring.queue.put(upload)
        return upload

    def staged(self, upload: Upload) -> bool:
        """Whether its source is no longer read. Raises what went wrong in a thread, with any upload."""
        self._ring.check()
        return upload._staged.is_set()

    def landed(self, upload: Upload) -> bool:
        """Whether its bytes are on the device, for all that is given to it from now on. Raises as `staged` does."""
        whole = self.staged(upload) and len(upload.fences) == len(upload.target)
        return whole and all(fence.over() for fence in upload.fences)

    def wait(self, upload: Upload) -> None:
        """Until it is staged, for one whose fences are to be followed. Raises as `staged` does."""
        upload._staged.wait()
        self._ring.check()

    def close(self) -> None:
        """End. No source is read from here on and no target is written to; what has not begun never will.

        After an interruption it can be called again.
        """
        self._ring.close()


@dataclass(eq=False)
class _Buffer:
    """Memory of the host from which the device copies, and when it has done so."""

    memory: Tensor  # uint8
    fences: list[Fence] = field(default_factory=list)


class _Ring:
    """The buffers, and the threads that fill them: always the one next that was filled longest ago.

    Threads hold this, so this holds nothing that holds what is to end them: no device, which may know a whole model.
    """

    def __init__(self, upload: BeginUpload, buffers: Sequence[_Buffer], threads: int) -> None:
        self.queue = SimpleQueue[Upload | None]()  # None: for one thread to end
        self.closed = False
        self._upload = upload
        self._buffers = buffers
        self._next = SimpleQueue[_Buffer]()
        for buffer in buffers:
            self._next.put(buffer)
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name="uploads", daemon=True) for _ in range(threads)]

    def begin(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what went wrong first."""
        if self._error:
            raise self._error

    def close(self) -> None:
        """See Uploads."""
        self.closed = True
        for _ in self._threads:
            self.queue.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():  # where garbage is collected
                thread.join()
        for buffer in self._buffers:
            for fence in buffer.fences:
                fence.wait()

    def _work(self) -> None:
        while upload := self.queue.get():
            try:
                self._carry(upload)
            except BaseException as error:  # whatever it is, the main thread has to know
                self._error = self._error or error
            upload._staged.set()

    def _carry(self, upload: Upload) -> None:
        buffer = self._next.get()
        try:
            for fence in buffer.fences:
                fence.wait()
            if not self.closed:
                buffer.fences = upload.fences
                self._fill(buffer.memory.numpy(), upload.source)
                self._send(buffer.memory, upload)
        finally:
            self._next.put(buffer)

    @staticmethod
    def _fill(memory: NDArray[np.uint8], source: Sequence[NDArray[np.uint8]]) -> None:
        first = 0
        for part in source:
            memory[first : first + part.nbytes] = part
            first += part.nbytes

    def _send(self, memory: Tensor, upload: Upload) -> None:
        first = 0
        for target in upload.target:
            source = memory[first : first + target.nbytes]
            upload.fences.append(self._upload(source, target.view(torch.uint8), upload.after))
            first += target.nbytes
