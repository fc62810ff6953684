"""Writes one shard front to back in our order and padding, which the `safetensors` library cannot.

The caller fills and hashes one buffer while a thread of the writer writes the other past the page cache. That thread
does not hash: more threads that compute than there are cores keep each other from the interpreter.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from mosaic.format import direct
from mosaic.format.jsonfile import rename_durably
from mosaic.format.layout import ShardLayout

BUFFER = 4 << 20  # two of them for each writer


class ShardWriter:
    """Writes into `temporary`, hashing as it goes; `finish`, then `publish`.

    A context manager: leaving it by an exception removes the temporary file.
    """

    def __init__(self, layout: ShardLayout, temporary: Path) -> None:
        self.layout = layout
        self._temporary = temporary
        self._pending = iter(layout.entries)
        self._sha256 = hashlib.sha256()
        self._position = 0  # in the file, of the buffer being filled
        self._fill = 0
        self._buffer, self._other = direct.aligned(BUFFER), direct.aligned(BUFFER)
        self._descriptor = direct.open_direct(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._thread = ThreadPoolExecutor(1)
        self._flushing: Future[None] | None = None
        self._put(layout.header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._thread.shutdown()
        os.close(self._descriptor)
        if kind is not None:
            self._temporary.unlink(missing_ok=True)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the next tensor of the layout, in any number of contiguous pieces."""
        entry = next(self._pending)
        assert entry.name == name, f"{entry.name} is next, not {name}"
        written = sum(self._put(chunk) for chunk in chunks)
        assert written == entry.nbytes, f"{name}: {written} bytes written, {entry.nbytes} planned"

    def finish(self) -> str:
        """Make the temporary file durable; the sha256 of its bytes in hex."""
        assert next(self._pending, None) is None, "tensors are missing"
        nbytes = self._position + self._fill
        self._flush()
        self._wait()
        os.ftruncate(self._descriptor, nbytes)
        os.fsync(self._descriptor)
        return self._sha256.hexdigest()

    def publish(self, final: Path) -> None:
        """Give the finished file its name."""
        rename_durably(self._temporary, final)

    def _put(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._sha256.update(view)
        done = 0
        while done < len(view):
            part = view[done : done + BUFFER - self._fill]
            self._buffer.data[self._fill : self._fill + len(part)] = part
            self._fill += len(part)
            done += len(part)
            if self._fill == BUFFER:
                self._flush()
        return len(view)

    def _flush(self) -> None:
        """Hand the buffer to the thread and take the other, which the thread is done with by then."""
        self._wait()
        self._flushing = self._thread.submit(self._write_out, self._buffer, self._fill, self._position)
        self._position += self._fill
        self._fill = 0
        self._buffer, self._other = self._other, self._buffer

    def _wait(self) -> None:
        if self._flushing:
            self._flushing.result()

    def _write_out(self, buffer: direct.Bytes, fill: int, position: int) -> None:
        """Write in whole pages: what is too much at the end is cut off by `finish`."""
        whole = direct.aligned_size(fill)
        buffer[fill:whole] = 0
        direct.write(self._descriptor, buffer[:whole], position)
