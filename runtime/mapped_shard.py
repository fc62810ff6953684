"""A file of tensors in the address space."""

import contextlib
import mmap
import weakref
from pathlib import Path

import numpy as np

from mosaic import _native
from mosaic.format.errors import InputError

MADV_POPULATE_READ = 22  # of Linux; the mmap module has no name for it


class MappedShard:
    """One shard in the address space, read-only. Pages are read when touched."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._guard()

    def _guard(self) -> None:
        """If the file becomes shorter, the system can only send a signal: have it tell why."""
        error = InputError(
            "a mapped file became shorter while it was in use, or the disk cannot read it",
            file=self.file,
            found=f"less than {len(self._map):,} bytes",
            expected="nothing that writes to it",
            remedy="check the disk (dmesg); copy the model directory again, or convert the checkpoint again",
        )
        view = np.frombuffer(self._map, np.uint8)
        _native.guard_mapping(view, f"error: {error}\n")
        weakref.finalize(self, _native.release_mapping, view)

    @property
    def buffer(self) -> mmap.mmap:
        """Its bytes. Nothing may write to them."""
        return self._map

    def populate(self, first: int = 0, end: int | None = None) -> None:
        """Read all pages now, or those of some bytes.

        One that a kernel touches first stops it for longer than its bytes take.
        In huge pages where the file system has them, since small ones cost a third of the memory's speed; what is
        cached in small ones stays so.
        """
        for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_READ):
            self._advise(advice, first, end)

    def release(self, first: int, end: int) -> None:
        """Map the pages of some bytes no longer, until they are used again; the system may then forget them."""
        self._advise(mmap.MADV_DONTNEED, first, end)

    def _advise(self, advice: int, first: int, end: int | None) -> None:
        first -= first % mmap.PAGESIZE
        with contextlib.suppress(OSError):  # Linux without huge pages, or before 5.14
            self._map.madvise(advice, first, (len(self._map) if end is None else end) - first)

    def will_need(self, offset: int, nbytes: int) -> None:
        """Begin to read some bytes; does not wait for them."""
        first = offset - offset % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, first, offset + nbytes - first)
