"""Holds two model directories against each other, tensor by tensor: same bytes, or how far apart.

Any directory will do whose tensors Mosaic knows: BF16, official FP8, Mosaic's own; experts fused or one by one.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.quantize import count_codes
from mosaic.convert.reader import Slice, TensorReader
from mosaic.convert.sums import CodeUse, ErrorSums
from mosaic.format import architectures, layout
from mosaic.format.layout import Entry, Stored
from mosaic.format.match import Source, match
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import TensorSpec


@dataclass
class Model:
    """The tensors of one directory, by key."""

    checkpoint: Checkpoint
    contract: dict[str, TensorSpec]
    sources: dict[str, Source]

    def stored(self, key: str) -> Stored:
        """How it stores a tensor."""
        spec, (piece, scale) = self.contract[key], self.sources[key]
        scales = Entry(spec.scale_name, self.checkpoint.dtype(scale), scale.shape) if scale else None
        return Stored(spec, Entry(spec.name, self.checkpoint.dtype(piece), spec.shape), scales)

    def reader(self, key: str) -> TensorReader:
        """Reads a tensor."""
        return TensorReader(self.checkpoint, self.contract[key].shape, *self.sources[key])


@dataclass
class Pair:
    """One tensor in both directories; error of the second against the first where the bytes differ."""

    first: Stored
    second: Stored
    equal: bool = False  # same dtype, weights and scales
    sums: ErrorSums = field(default_factory=ErrorSums)  # unless equal
    use: CodeUse = field(default_factory=CodeUse)  # of the second, if it is E4M3
    incomparable: int = 0  # weights that are NaN or infinite in the second; left out of the sums, as in the first

    def add_error(self, one: Slice, other: Slice) -> None:
        """Count the error of one slice."""
        source, stored = one.floats(), other.floats()
        sound, usable = np.isfinite(source), np.isfinite(stored)
        if not (sound.all() and usable.all()):
            self.sums.nonfinite += int(np.count_nonzero(~sound))
            self.incomparable += int(np.count_nonzero(~usable))
            source, stored = (np.where(sound & usable, values, np.float32(0)) for values in (source, stored))
        self.sums.add_values(source, stored)

    def add_use(self, other: Slice) -> None:
        """Count codes and scales of one slice."""
        if other.scales is not None:
            self.use.codes += count_codes(other.values)
            self.use.add_scales(other.scales)


def open_model(checkpoint: Checkpoint) -> Model:
    """What a directory holds; InputError if that is not what its config.json calls for."""
    config_file = checkpoint.folder / layout.CONFIG_FILE
    architecture = architectures.find(checkpoint.config, config_file)
    spec = architecture.parse(checkpoint.config, config_file)
    contract = architecture.tensors(spec, checkpoint.config, checkpoint.tensors.keys())
    return Model(checkpoint, {tensor.key: tensor for tensor in contract}, match(checkpoint, contract))


def shared(one: Model, other: Model) -> list[str]:
    """Keys of the tensors that both have in the same shape, in the order of the second."""
    return [
        key for key, spec in other.contract.items() if key in one.contract and one.contract[key].shape == spec.shape
    ]


def pairs(one: Model, other: Model, workers: int, progress: Callable[[int], object]) -> Iterator[Pair]:
    """Every shared tensor, compared. `progress` is told of the bytes of `other` that were compared."""

    def compared(key: str) -> Pair:
        pair, first, second = Pair(one.stored(key), other.stored(key)), one.reader(key), other.reader(key)
        slices = list(second.slices())
        if pair.first.weight.dtype == pair.second.weight.dtype:
            pair.equal = all(_same(first.read(rows), second.read(rows)) for rows in slices)
        for rows in slices if pair.second.scale or not pair.equal else ():
            data = second.read(rows)
            pair.add_use(data)
            if not pair.equal:
                pair.add_error(first.read(rows), data)
        progress(pair.second.weight.nbytes)
        return pair

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(compared, key) for key in shared(one, other)]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _same(one: Slice, other: Slice) -> bool:
    return _same_bytes(one.values, other.values) and _same_bytes(one.scales, other.scales)


def _same_bytes(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
