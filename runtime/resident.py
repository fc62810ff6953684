"""Tensors as memory: views of buffers, and copies in memory of their own, read past the page cache."""

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosaic.format.direct import Memory, aligned, open_direct, read, spanned
from mosaic.format.shard import TensorInfo
from mosaic.runtime.experts.shards import changed, mark, unreadable

CACHE_LINE = 64
READ_BYTES = 4 << 20  # at a time
TORCH = {"F8_E4M3": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def tensor_at(buffer: Any, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    """A tensor over the bytes at `offset` of a buffer."""
    count = torch.Size(shape).numel()
    return torch.frombuffer(buffer, dtype=TORCH[dtype], count=count, offset=offset).view(shape)


def resident_nbytes(infos: Mapping[str, TensorInfo]) -> int:
    """Bytes that `read_tensors` takes for good."""
    return sum(map(_room, infos.values()))


def read_tensors(infos: Mapping[str, TensorInfo], told: Callable[[int], object]) -> dict[str, Tensor]:
    """The tensors by their names, in one piece of memory in huge pages. `told` of the bytes of each read."""
    memory, used, buffer, tensors = aligned(resident_nbytes(infos)), 0, Memory(), {}
    places = sorted(infos.items(), key=lambda item: (item[1].file, item[1].offset))
    for file, group in itertools.groupby(places, key=lambda item: item[1].file):
        descriptor = open_direct(file, os.O_RDONLY)
        try:
            for name, info in group:
                for first in range(0, info.nbytes, READ_BYTES):
                    count, offset = min(READ_BYTES, info.nbytes - first), info.offset + first
                    try:
                        part = read(descriptor, offset, count, buffer.take(spanned(offset, offset + count)))
                    except OSError as error:
                        raise unreadable(info.file, error) from error
                    if len(part) < count:
                        raise changed(info.file)
                    memory[used + first : used + first + count] = part
                    told(count)
                tensors[name] = tensor_at(memory, info.dtype, info.shape, used)
                used += _room(info)
        finally:
            os.close(descriptor)
    return tensors


def rows_of(table: Tensor, numbers: Sequence[int]) -> Tensor:
    """Rows [T, K] of a matrix by their numbers."""
    return table[torch.tensor(numbers, dtype=torch.long)]


class FileRows:
    """Rows of a matrix, each read from the file when it is asked for."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self._descriptor = os.open(info.file, os.O_RDONLY)
        self._unchanged = mark(self._descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """Rows [T, K] by their numbers. InputError if the file was written to since it was opened."""
        info = self._info
        width = info.nbytes // info.shape[0]
        found = np.empty((len(numbers), width), np.uint8)
        try:
            counts = [
                os.preadv(self._descriptor, [row.data], info.offset + number * width)
                for row, number in zip(found, numbers, strict=True)
            ]
        except OSError as error:
            raise unreadable(info.file, error) from error
        if mark(self._descriptor) != self._unchanged or min(counts) < width:
            raise changed(info.file)
        return torch.from_numpy(found).view(TORCH[info.dtype])


def _room(info: TensorInfo) -> int:
    """Bytes that a tensor takes beside others, each on cache lines of its own."""
    return -(-info.nbytes // CACHE_LINE) * CACHE_LINE
