"""Converts one shard, front to back, into a temporary file and a record of it, then gives both their names.

Slices are read ahead in batches while others are converted, and written behind by the ShardWriter's thread. Scales
follow their weights in the file, so they wait in memory: 0.02 % of the codes.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from mosaic.convert import report
from mosaic.convert.plan import ConversionPlan, ShardPlan
from mosaic.convert.reader import Slice, TensorReader, ahead, read_slices
from mosaic.convert.tensor import TensorConversion
from mosaic.format import direct, index, layout
from mosaic.format.jsonfile import to_bytes, write_durably
from mosaic.format.shard_writer import ShardWriter
from mosaic.format.source import Rows

RECORD_VERSION = 2
READ_AHEAD = 3  # batches of a shard: one is converted, two are read
BATCH = 6  # slices, of a million weights each
MOST_SLICES = 120  # in the batches of all shards together, as long as that is one slice for each batch


class StoppedError(Exception):
    """Another shard failed or the user interrupted."""


class ShardConversion:
    """One shard of a plan on its way to `out`, one of `workers`. `progress` is told of the bytes stored."""

    def __init__(
        self, plan: ConversionPlan, shard: ShardPlan, out: Path, workers: int, progress: Callable[[int], object]
    ) -> None:
        self._plan = plan
        self._shard = shard
        self._out = out
        self._progress = progress
        self._batch = max(min(BATCH, MOST_SLICES // workers // READ_AHEAD), 1)
        self._conversions = {
            planned.stored.spec.name: TensorConversion(plan.checkpoint, planned, plan.nonfinite)
            for planned in shard.tensors
        }
        self._crcs: dict[int, int] = {}  # by expert, of its weights, continued over its scales

    def run(self, readers: Executor, stop: threading.Event) -> None:
        """Convert, unless `stop` is set meanwhile."""
        file = self._shard.layout.file
        # An earlier conversion that was half removed may have left a shard of this name. With the record, which comes
        # first, it would pass for this one.
        (self._out / file).unlink(missing_ok=True)
        with ShardWriter(self._shard.layout, partial_file(self._out, file)) as writer:
            self._write(writer, readers, stop)
            record = self._record(writer.finish())
            write_durably(record_file(self._out, file), to_bytes(record, indent=0))
            writer.publish(self._out / file)

    def _write(self, writer: ShardWriter, readers: Executor, stop: threading.Event) -> None:
        entries = self._shard.layout.entries
        weights = [self._conversions[entry.name] for entry in entries if entry.name in self._conversions]
        slices = [(tensor.reader, rows) for tensor in weights for rows in tensor.reader.slices()]
        data = self._read(slices, readers)
        scales: dict[str, tuple[TensorConversion, bytes]] = {}
        for entry in entries:
            if entry.name in scales:
                tensor, waiting = scales.pop(entry.name)
                writer.write(entry.name, self._counted(iter([memoryview(waiting)]), tensor, stop))
                continue
            tensor = self._conversions[entry.name]
            chunks = (tensor.convert(next(data)) for _ in tensor.reader.slices())
            writer.write(entry.name, self._counted(chunks, tensor, stop))
            if scale := tensor.planned.stored.scale:
                scales[scale.name] = (tensor, tensor.scale_bytes())

    def _read(self, slices: list[tuple[TensorReader, Rows]], readers: Executor) -> Iterator[Slice]:
        """All slices in order, read in batches, the next batch while one is converted."""
        memory = [direct.Memory() for _ in range(READ_AHEAD)]
        batches = (
            partial(read_slices, self._plan.checkpoint, slices[first : first + self._batch], memory[turn % READ_AHEAD])
            for turn, first in enumerate(range(0, len(slices), self._batch))
        )
        return chain.from_iterable(ahead(batches, readers, READ_AHEAD))

    def _counted(
        self, chunks: Iterator[memoryview], tensor: TensorConversion, stop: threading.Event
    ) -> Iterator[memoryview]:
        expert = tensor.planned.stored.spec.expert
        for chunk in chunks:
            if stop.is_set():
                raise StoppedError
            yield chunk
            self._progress(chunk.nbytes)
            if expert is not None:
                self._crcs[expert] = index.crc32c(chunk, self._crcs.get(expert, 0))

    def _record(self, sha256: str) -> dict[str, Any]:
        tensors = [self._conversions[planned.stored.spec.name] for planned in self._shard.tensors]
        return {
            "version": RECORD_VERSION,
            "plan": self._plan.digest,
            "nbytes": self._shard.layout.nbytes,
            "sha256": sha256,
            "crc32c": [self._crcs[expert] for expert in sorted(self._crcs)],
            "tensors": [report.tensor_entry(tensor.planned, tensor.sums, tensor.use) for tensor in tensors],
            "histograms": report.histograms((tensor.planned.stored, tensor.use) for tensor in tensors),
        }


def partial_file(out: Path, file: str) -> Path:
    """Where a shard is while it is written."""
    return out / layout.WORK_FOLDER / f"{file}.partial"


def record_file(out: Path, file: str) -> Path:
    """The record of a finished shard."""
    return out / layout.WORK_FOLDER / f"{file}.json"
