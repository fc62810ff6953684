"""The bytes of a session file, written and read front to back with a checksum for each tensor. Knows no tensor."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mosaic.format.direct import Bytes
from mosaic.format.index import crc32c
from mosaic.format.jsonfile import rename_durably

_STEP = 1 << 20  # bytes of what is only checked that are read at a time


def write(file: Path, header: bytes, tensors: Iterable[Iterable[Bytes]]) -> None:
    """Write tensors, each in pieces, and their checksums: a file only its owner can read, there whole or not at all."""
    descriptor, name = tempfile.mkstemp(".tmp", f".{file.name}.", file.parent)  # of mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(header)
            checksums = [crc32c(header)]
            for pieces in tensors:
                checksum = 0
                for piece in pieces:
                    stream.write(piece.data)
                    checksum = crc32c(piece.data, checksum)
                checksums.append(checksum)
            stream.write(np.array(checksums, "<u4").data)
            stream.flush()
            os.fsync(stream.fileno())
        rename_durably(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


class Reader:
    """Reads what `write` wrote, from the start of a stream. EOFError if it ends early."""

    def __init__(self, stream: BinaryIO, header_nbytes: int) -> None:
        self._stream = stream
        self._checksums: list[int] = []
        self.skip(header_nbytes)

    def read(self, pieces: Iterable[Bytes]) -> None:
        """Fill arrays with the next tensor."""
        checksum = 0
        for piece in pieces:
            if self._stream.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
                raise EOFError
            checksum = crc32c(piece.data, checksum)
        self._checksums.append(checksum)

    def skip(self, nbytes: int) -> None:
        """Pass over the next tensor; its checksum counts all the same."""
        room = np.empty(min(nbytes, _STEP), np.uint8)
        self.read(room[: min(nbytes - first, _STEP)] for first in range(0, nbytes, _STEP))

    def damaged(self) -> int | None:
        """The first tensor whose checksum is wrong, the header counting as 0; None if all are right."""
        expected = np.empty(len(self._checksums), "<u4")
        if self._stream.readinto(expected.view(np.uint8).data) != expected.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        wrong = np.flatnonzero(expected != np.array(self._checksums, np.uint32))
        return int(wrong[0]) if len(wrong) else None
