"""Writes one shard front to back in our order and padding, which the `safetensors` library cannot.

The caller puts the bytes where they leave from, in one of three buffers. What is full is hashed by one thread and
written past the page cache by another, both in the order of the file.
"""

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mosaic.format import direct
from mosaic.format.jsonfile import rename_durably
from mosaic.format.layout import PAGE, ShardLayout

BUFFER = 2 << 20  # larger if more is asked for at once
BUFFERS = 3  # for each writer: one is filled, one hashed, one written


class _Buffer:
    """Memory of whole pages, and what is still being done with its contents."""

    def __init__(self) -> None:
        self.bytes = direct.aligned(BUFFER)
        self.leaving: list[Future[Any]] = []

    def emptied(self) -> None:
        """Wait until it may be filled again."""
        while self.leaving:
            self.leaving.pop().result()


class ShardWriter:
    """Writes into `temporary`: `room` and `add` in turn, then `finish`, then `publish`.

    A context manager: leaving it by an exception removes the temporary file.
    """

    def __init__(self, layout: ShardLayout, temporary: Path) -> None:
        self.layout = layout
        self._temporary = temporary
        self._pending = iter(layout.entries)
        self._name = ""  # of the tensor at hand
        self._left = 0  # of its bytes
        self._sha256 = hashlib.sha256()
        self._buffers = deque(_Buffer() for _ in range(BUFFERS))  # the first is being filled
        self._fill = 0
        self._position = 0  # of that buffer, in the file
        self._descriptor = direct.open_direct(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._hasher, self._writer = ThreadPoolExecutor(1, "hash"), ThreadPoolExecutor(1, "write")
        self.room(len(layout.header))[:] = np.frombuffer(layout.header, np.uint8)
        self._fill += len(layout.header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._hasher.shutdown()
        self._writer.shutdown()
        os.close(self._descriptor)
        if kind is not None:
            self._temporary.unlink(missing_ok=True)

    def room(self, nbytes: int) -> direct.Bytes:
        """Where the next `nbytes` of the file go."""
        if self._fill + nbytes > len(self._buffers[0].bytes):
            self._turn()
            filled = self._buffers[0].bytes
            if self._fill + nbytes > len(filled):
                self._buffers[0].bytes = direct.aligned(self._fill + nbytes)
                self._buffers[0].bytes[: self._fill] = filled[: self._fill]
        return self._buffers[0].bytes[self._fill : self._fill + nbytes]

    def add(self, name: str, nbytes: int) -> None:
        """Bytes are in their room: the next tensor of the layout, or the next part of one."""
        if not self._left:
            entry = next(self._pending)
            self._name, self._left = entry.name, entry.nbytes
        assert name == self._name, f"{self._left} bytes of {self._name} come next, not {name}"
        assert nbytes <= self._left, f"{nbytes} bytes for the last {self._left} of {name}"
        self._left -= nbytes
        self._fill += nbytes

    def finish(self) -> str:
        """Make the temporary file durable; the sha256 of its bytes in hex."""
        assert not self._left, f"{self._left} bytes of {self._name} are missing"
        assert next(self._pending, None) is None, "tensors are missing"
        whole = direct.aligned_size(self._fill)
        self._buffers[0].bytes[self._fill : whole] = 0  # what is too much at the end is cut off below
        self._send(self._fill, whole)
        for buffer in self._buffers:
            buffer.emptied()
        os.ftruncate(self._descriptor, self._position + self._fill)
        os.fsync(self._descriptor)
        return self._sha256.hexdigest()

    def publish(self, final: Path) -> None:
        """Give the finished file its name."""
        rename_durably(self._temporary, final)

    def _turn(self) -> None:
        """Send the whole pages of the buffer; what is left of it begins the next one."""
        whole = self._fill // PAGE * PAGE
        rest = self._buffers[0].bytes[whole : self._fill]
        self._send(whole, whole)
        self._buffers.rotate(-1)
        self._buffers[0].emptied()
        self._buffers[0].bytes[: len(rest)] = rest
        self._position += whole
        self._fill = len(rest)

    def _send(self, hashed: int, written: int) -> None:
        buffer = self._buffers[0]
        buffer.leaving = [
            self._hasher.submit(self._sha256.update, buffer.bytes[:hashed].data),
            self._writer.submit(direct.write, self._descriptor, buffer.bytes[:written], self._position),
        ]
