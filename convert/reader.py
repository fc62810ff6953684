"""Reads one tensor of a checkpoint slice by slice, of an FP8 one with the scales of its blocks. Any thread may read.

`ahead` is how reading and computing overlap.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.quantize import Location
from mosaic.format import direct, e4m3
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint, Rows
from mosaic.format.tensors import Piece

SLICE_WEIGHTS = 1 << 20  # part of the report's arithmetic (error sums are added slice by slice), so it is fixed


T = TypeVar("T")


def ahead(jobs: Iterable[Callable[[], T]], readers: Executor, depth: int) -> Iterator[T]:
    """The results of jobs in order, `depth` of them at a time on their way.

    Job n + depth begins when the result of job n has been used, so `depth` pieces of memory do for all of them.
    """
    waiting: deque[Future[T]] = deque()
    for job in jobs:
        waiting.append(readers.submit(job))
        if len(waiting) == depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Slice(NamedTuple):
    """Some rows of a tensor; `scales` only with E4M3 codes, those of their blocks.

    Of slices that are read ahead, the arrays are good until the next slice is asked for: copy what is to stay.
    """

    first: int
    values: NDArray[Any]
    scales: NDArray[Any] | None

    def floats(self) -> NDArray[np.float32]:
        """The weights in float32."""
        if self.scales is None:
            return self.values.astype(np.float32)
        return e4m3.dequantize(self.values, self.scales)


class TensorReader:
    """One tensor: the piece it stands in, and for FP8 the piece with its scales."""

    def __init__(self, checkpoint: Checkpoint, shape: tuple[int, ...], piece: Piece, scale: Piece | None) -> None:
        self._checkpoint = checkpoint
        self._shape = shape
        self._piece = piece
        self._scale = scale

    def slices(self) -> Iterator[Rows]:
        """Row ranges of about SLICE_WEIGHTS weights, cut between blocks."""
        row = prod(self._shape[1:]) or 1
        step = max(SLICE_WEIGHTS // row // e4m3.BLOCK, 1) * e4m3.BLOCK
        for first in range(0, self._shape[0], step):
            yield first, min(first + step, self._shape[0])

    def read(self, rows: Rows, memory: direct.Memory | None = None) -> Slice:
        """Read one slice, in `memory` if it is given."""
        values = self._checkpoint.read(self._piece, rows, memory)
        if self._scale is None:
            return Slice(rows[0], values, None)
        blocks = rows[0] // e4m3.BLOCK, -(-rows[1] // e4m3.BLOCK)
        scales = self._checkpoint.read(self._scale, blocks)
        self._check_scales(self._scale, scales, blocks[0])
        return Slice(rows[0], values, scales)

    def location(self, first: int) -> Location:
        """Where the slice that begins at row `first` stands."""
        piece = self._piece
        origin = piece.rows[0] if piece.rows else 0
        return Location(self._checkpoint.tensors[piece.name].file, piece.name, piece.index, origin, first)

    def _check_scales(self, piece: Piece, scales: NDArray[Any], first: int) -> None:
        values = scales.astype(np.float32)
        bad = ~((values > 0) & (values <= e4m3.LARGEST_SCALE))  # NaN compares false
        if bad.any():
            row, column = (int(axis[0]) for axis in np.nonzero(bad))
            place = f"block ({first + row}, {column})"
            raise InputError(
                "an FP8 source has a scale that means nothing",
                file=self._checkpoint.tensors[piece.name].file,
                tensor=piece.name,
                found=f"{values[row, column]} for {place}; {np.count_nonzero(bad)} in this slice",
                expected=f"scales above 0, up to {e4m3.LARGEST_SCALE:.3e}",
                remedy="download the file again, or convert the BF16 checkpoint",
            )
