"""experts.npy, the expert-offset index: where the bytes of every routed expert lie. A cache of the shard headers.

One row per (layer, expert), sorted; the runtime reads an expert with one read of its span and one of its scales.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError

EXPERTS_FILE = "experts.npy"
NO_SCALES = "NONE"
MOST = 2**16 - 1  # layers or experts that a row can number

ROW = np.dtype(
    [
        ("layer", "<u2"),
        ("expert", "<u2"),
        ("shard", "S32"),
        ("code_dtype", "S8"),
        ("scale_dtype", "S8"),
        ("offset", "<u8"),  # of the span: gate | up | down, from the start of the file
        ("gate_nbytes", "<u8"),
        ("up_nbytes", "<u8"),
        ("down_nbytes", "<u8"),
        ("scale_offset", "<u8"),  # of the scales: gate | up | down
        ("scale_nbytes", "<u8"),
        ("crc32c", "<u4"),  # of the span, continued over the scales
    ]
)

Rows = NDArray[Any]


class Span(NamedTuple):
    """A tensor's dtype and place in its file."""

    dtype: str
    offset: int
    nbytes: int


def place(shard: str, weights: Sequence[Span], scales: Sequence[Span]) -> tuple[bytes | int, ...]:
    """The columns from `shard` to `scale_nbytes` of an expert whose gate, up and down (and scales) stand there."""
    return (
        shard.encode(),
        weights[0].dtype.encode(),
        (scales[0].dtype if scales else NO_SCALES).encode(),
        weights[0].offset,
        *(weight.nbytes for weight in weights),
        scales[0].offset if scales else 0,
        sum(scale.nbytes for scale in scales),
    )


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """CRC32C of `data`, continuing from `value`."""
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8)))  # takes arrays as they are, copies no view


def to_bytes(rows: Rows | list[tuple[Any, ...]]) -> bytes:
    """Rows (in the order of ROW's columns) as the bytes of a .npy file, without pickles."""
    stream = io.BytesIO()
    np.save(stream, np.asarray(rows, dtype=ROW), allow_pickle=False)
    return stream.getvalue()


def read_index(file: Path) -> Rows:
    """The rows of an index; InputError if it is not one.

    The header must be the one numpy writes for as many rows as the file has room for: np.load would believe it, and
    evaluate it, whatever it says.
    """
    if file.exists() and not file.is_file():
        raise _refused(file, "something that is no file")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _refused(file, error.strerror) from error
    start = 10 + int.from_bytes(data[8:10], "little")
    count, rest = divmod(len(data) - start, ROW.itemsize)
    if count < 0 or rest or data[:start] != to_bytes(np.zeros(count, ROW))[:start]:
        raise _refused(file, f"{len(data)} bytes that begin with {data[:16]!r}")
    return np.frombuffer(data, ROW, offset=start)


def _refused(file: Path, found: object) -> InputError:
    return InputError(
        "not an expert index",
        file=file,
        found=found,
        expected=f"a .npy array with the columns {', '.join(ROW.names or ())}",
        remedy="convert the checkpoint again",
    )
