"""The shards of a model as open files: descriptors for reads past the page cache, and whether anyone changed them."""

import os
import weakref
from collections.abc import Iterable
from pathlib import Path

from mosaic.format.direct import open_direct
from mosaic.format.errors import InputError


class ShardFiles:
    """Open shards. What is deleted or renamed stays readable; what is written to is refused."""

    def __init__(self, folder: Path, shards: Iterable[str] = ()) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._marks: dict[str, tuple[int, int]] = {}  # size and time of the last change when it was opened
        self.close = weakref.finalize(self, _close, self._descriptors)  # no read may be on its way
        for shard in shards:
            self.descriptor(shard)

    def descriptor(self, shard: str) -> int:
        """For reading; opened when first asked for."""
        if shard not in self._descriptors:
            try:
                self._descriptors[shard] = open_direct(self._folder / shard, os.O_RDONLY)
            except OSError as error:
                raise self.failed(shard, error) from error
            self._marks[shard] = mark(self._descriptors[shard])
        return self._descriptors[shard]

    def file(self, shard: str) -> Path:
        """Where a shard is."""
        return self._folder / shard

    def check(self, shard: str) -> None:
        """InputError if an open shard was written to or cut since it was opened."""
        if mark(self._descriptors[shard]) != self._marks[shard]:
            raise changed(self._folder / shard)

    def check_all(self) -> None:
        """The same for all that are open."""
        for shard in self._descriptors:
            self.check(shard)

    def failed(self, shard: str, error: OSError | EOFError) -> InputError:
        """What to tell about a read that failed."""
        if shard in self._marks:
            self.check(shard)  # the likelier cause, told better
        return unreadable(self._folder / shard, error)


def mark(descriptor: int) -> tuple[int, int]:
    """Size and time of the last change of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def changed(file: Path) -> InputError:
    """What to tell of a shard that is not what was opened."""
    return InputError(
        "a shard changed while the model was running",
        file=file,
        found="a file that was written to",
        expected="the file that was opened",
        remedy="let nothing write to a model directory that is in use; mosaic-verify tells whether it is whole",
    )


def unreadable(file: Path, error: Exception) -> InputError:
    """What to tell of a read that failed."""
    remedy = "check the disk (dmesg) and ulimit -n, then mosaic-verify the model directory"
    return InputError("a shard cannot be read", file=file, found=error, expected="its bytes", remedy=remedy)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
