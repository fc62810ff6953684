"""Converts one shard, front to back, into a temporary file and a record of it, then gives both their names.

Slices are read ahead while others are converted into the buffers of the ShardWriter, whose threads hash and write them:
together as much computing as two cores do. Scales follow their weights in the file, so they wait in memory: 0.02 % of
the codes.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from mosaic.convert import report
from mosaic.convert.plan import ConversionPlan, ShardPlan
from mosaic.convert.reader import Slice, TensorReader, ahead
from mosaic.convert.tensor import TensorConversion
from mosaic.format import direct, index, layout
from mosaic.format.jsonfile import to_bytes, write_durably
from mosaic.format.shard_writer import ShardWriter
from mosaic.format.source import Rows

RECORD_VERSION = 2
READERS = 2  # threads of a shard that read: a disk is to have its next request before it has answered the last
READ_AHEAD = 6  # slices that are being read or wait; more memory than this leaves the CPU's cache
MOST_SLICES = 84  # of all shards together, as long as that is READERS for each


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
        self._ahead = max(min(READ_AHEAD, MOST_SLICES // workers), READERS)
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
        data = self._read([(tensor.reader, rows) for tensor in weights for rows in tensor.reader.slices()], readers)
        scales: dict[str, tuple[TensorConversion, direct.Bytes]] = {}
        for entry in entries:
            if entry.name in scales:
                tensor, waiting = scales.pop(entry.name)
                room = writer.room(entry.nbytes)
                room[:] = waiting
                self._add(writer, entry.name, room, tensor, stop)
                continue
            tensor = self._conversions[entry.name]
            for _ in tensor.reader.slices():
                self._add(writer, entry.name, tensor.convert(next(data), writer.room), tensor, stop)
            if scale := tensor.planned.stored.scale:
                scales[scale.name] = (tensor, tensor.scale_bytes())

    def _add(
        self, writer: ShardWriter, name: str, stored: direct.Bytes, tensor: TensorConversion, stop: threading.Event
    ) -> None:
        """Some bytes of a tensor are in their room."""
        if stop.is_set():
            raise StoppedError
        writer.add(name, len(stored))
        self._progress(len(stored))
        if (expert := tensor.planned.stored.spec.expert) is not None:
            self._crcs[expert] = index.crc32c(stored.data, self._crcs.get(expert, 0))

    def _read(self, slices: list[tuple[TensorReader, Rows]], readers: Executor) -> Iterator[Slice]:
        """All slices in order, the next ones read while one is converted."""
        memory = cycle(direct.Memory() for _ in range(self._ahead))
        return ahead((partial(reader.read, rows, next(memory)) for reader, rows in slices), readers, self._ahead)

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
