"""File access past the page cache (O_DIRECT), where the file system has it; plain access where not.

Weights go through a conversion once, so caching them only costs: on a slow machine more time than the disk does, and
whatever else was cached. Direct access needs whole pages, in memory and in the file; that is hidden here.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.format.layout import PAGE

HUGE_PAGE = 2 << 20

Bytes = NDArray[np.uint8]


def open_direct(file: Path, flags: int) -> int:
    """A descriptor, direct if the file system can do that."""
    try:
        return os.open(file, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, flags, 0o666)


def aligned_size(nbytes: int) -> int:
    """The bytes of as many whole pages as `nbytes` need."""
    return -(-nbytes // PAGE) * PAGE


def aligned(nbytes: int) -> Bytes:
    """Memory that begins on a page, in whole pages, at least `nbytes`; in huge pages where that is worth it.

    A transfer is cut into as many requests as its memory has separate pieces: with huge pages a disk did twice as much.
    """
    nbytes = aligned_size(nbytes)
    if nbytes < HUGE_PAGE:
        memory, boundary = np.empty(nbytes + PAGE, np.uint8), PAGE
    else:
        pages = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory, boundary = np.frombuffer(pages, np.uint8), HUGE_PAGE
    start = -memory.ctypes.data % boundary
    return memory[start : start + nbytes]


class Memory:
    """Memory for one read at a time, used again by the next: huge pages are worth it only if they are kept."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """At least `nbytes`, aligned; what was taken before may be overwritten."""
        if len(self._bytes) < nbytes:
            self._bytes = aligned(nbytes)
        return self._bytes[: aligned_size(nbytes)]


def spanned(first: int, end: int) -> int:
    """Bytes of the pages in which a file's bytes from `first` to `end` lie."""
    return aligned_size(end) - first // PAGE * PAGE


def read(descriptor: int, offset: int, nbytes: int, memory: Bytes | None = None) -> Bytes:
    """`nbytes` from any offset, fewer if the file ends before; in aligned `memory` for these pages, if it is given."""
    end = min(offset + nbytes, os.fstat(descriptor).st_size)
    first = offset - offset % PAGE
    buffer = aligned(max(end - first, 0)) if memory is None else memory
    done = 0
    while first + done < end:
        count = _or_buffered(descriptor, os.preadv, [buffer[done:].data], first + done)
        done += count
        if first + done < end:  # cut short: go on at a page, unless the file ended meanwhile
            if count < PAGE:
                break
            done -= done % PAGE
    return buffer[offset - first : max(min(first + done, end), offset) - first]


def write(descriptor: int, buffer: Bytes, position: int) -> None:
    """Write a buffer of whole pages at a whole page."""
    done = 0
    while done < len(buffer):
        count = _or_buffered(descriptor, os.pwrite, buffer[done:].data, position + done)
        done += count
        if done < len(buffer):  # cut short: go on at a page, or be told why not
            if count < PAGE:
                raise OSError(errno.EIO, "a write of whole pages that stopped within one")
            done -= done % PAGE


def _or_buffered(descriptor: int, call: Callable[[int, Any, int], int], data: Any, position: int) -> int:
    """A transfer; through the page cache from now on if the file system refuses it as it stands."""
    try:
        return call(descriptor, data, position)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Another thread may have cleared the flag meanwhile; what is really invalid stays so.
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return call(descriptor, data, position)
