"""Carries a plan out: shards in parallel, each slice by slice, then index, report and catalog from their records.

Work in progress lies in OUT/.mosaic-convert: a `.partial` file per shard being written and a record per finished one,
renamed into place before its shard. A run that was stopped is resumed by running the same command again and writes
the same bytes; the catalog comes last, so its presence means complete.
"""

import hashlib
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mosaic.convert import report
from mosaic.convert.plan import COMPANIONS, ConversionPlan, Planned, ShardPlan
from mosaic.convert.quantize import check_kernels
from mosaic.convert.target import Standing, check_space, clear, locked, may_write, read_record
from mosaic.convert.tensor import TensorConversion
from mosaic.format import index, layout
from mosaic.format.catalog import Catalog, FileRecord
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.format.layout import Entry
from mosaic.format.shard import ShardWriter
from mosaic.format.tensors import Role

RECORD_VERSION = 1


def convert(plan: ConversionPlan, out: Path, *, workers: int, overwrite: bool, quiet: bool) -> bool:
    """Write the model directory; False if it was already there, complete and by the same plan.

    With `overwrite`, a directory of another plan, or a damaged or complete one of this plan, is written anew.
    """
    check_kernels()
    standing = may_write(plan, out, overwrite)
    if standing is Standing.COMPLETE and not (out / layout.WORK_FOLDER).exists():
        return False
    try:
        check_space(plan, out, standing, sum(shard.layout.nbytes for shard in _left(plan, out)))
        with locked(out):
            standing = may_write(plan, out, overwrite)  # again: another process may have been at work until now
            if standing is not Standing.COMPLETE:
                if standing is Standing.OTHER:
                    clear(out)
                _write_all(plan, out, workers, quiet)
            shutil.rmtree(out / layout.WORK_FOLDER, ignore_errors=True)
    except OSError as error:
        raise InputError(
            "reading or writing failed",
            file=error.filename or out,
            found=error.strerror or error,
            expected="a disk that reads and has room",
            remedy="mend that, then run the same command again: it goes on where it stopped",
        ) from error
    return standing is not Standing.COMPLETE


def _left(plan: ConversionPlan, out: Path) -> list[ShardPlan]:
    """The shards that are still to be written."""
    return [shard for shard in plan.shards if not _finished(plan, shard, out)]


def _write_all(plan: ConversionPlan, out: Path, workers: int, quiet: bool) -> None:
    left = _left(plan, out)
    bytes_left = sum(entry.nbytes for shard in left for entry in shard.layout.entries)
    with tqdm(total=plan.tensor_bytes, unit="B", unit_scale=True, disable=quiet or None, desc="convert") as bar:
        bar.update(plan.tensor_bytes - bytes_left)
        _run(plan, sorted(left, key=lambda shard: -shard.layout.nbytes), out, workers, bar)
    _complete(plan, out)


def _run(plan: ConversionPlan, shards: list[ShardPlan], out: Path, workers: int, bar: "tqdm[Any]") -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_write_shard, plan, shard, out, bar, stop) for shard in shards]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:  # an error or Ctrl-C: the others stop at their next slice
            stop.set()
            pool.shutdown(cancel_futures=True)


class _StoppedError(Exception):
    """Another shard failed or the user interrupted."""


def _write_shard(plan: ConversionPlan, shard: ShardPlan, out: Path, bar: "tqdm[Any]", stop: threading.Event) -> None:
    """One shard front to back. Scales follow their weights in the file, so they wait in memory: 0.02 % of the codes."""
    tensors = {planned.stored.spec.name: planned for planned in shard.tensors}
    conversions: dict[str, TensorConversion] = {}
    scales: dict[str, bytes] = {}
    crcs: dict[int, int] = {}
    with ShardWriter(shard.layout, out / layout.WORK_FOLDER / f"{shard.layout.file}.partial") as writer:

        def counted(chunks: Iterator[memoryview], expert: int | None) -> Iterator[memoryview]:
            for chunk in chunks:
                if stop.is_set():
                    raise _StoppedError
                yield chunk
                bar.update(chunk.nbytes)
                if expert is not None:
                    crcs[expert] = index.crc32c(chunk, crcs.get(expert, 0))

        for entry in shard.layout.entries:
            if entry.name in scales:
                writer.write(entry.name, counted(iter([memoryview(scales[entry.name])]), None))
                continue
            planned = tensors[entry.name]
            conversion = conversions[entry.name] = TensorConversion(plan.checkpoint, planned, plan.nonfinite)
            writer.write(entry.name, counted(conversion.chunks(), planned.stored.spec.expert))
            if planned.stored.scale:
                scales[planned.stored.scale.name] = conversion.scale_bytes()
        sha256 = writer.finish()
        for planned in shard.tensors:
            expert, scale = planned.stored.spec.expert, planned.stored.scale
            if expert is not None and scale:
                crcs[expert] = index.crc32c(scales[scale.name], crcs[expert])
        record = {
            "version": RECORD_VERSION,
            "plan": plan.digest,
            "nbytes": shard.layout.nbytes,
            "sha256": sha256,
            "crc32c": [crcs[expert] for expert in sorted(crcs)],
            "tensors": [
                report.tensor_entry(planned, conversions[planned.stored.spec.name].sums) for planned in shard.tensors
            ],
        }
        write_durably(_record_file(shard, out), to_bytes(record, indent=0))
        writer.publish(out / shard.layout.file)


def _finished(plan: ConversionPlan, shard: ShardPlan, out: Path) -> bool:
    """Whether a shard and its record are there, by this plan."""
    file = out / shard.layout.file
    record = read_record(_record_file(shard, out))
    wanted = (RECORD_VERSION, plan.digest, file.stat().st_size if file.is_file() else None)
    return (record.get("version"), record.get("plan"), record.get("nbytes")) == wanted


def _complete(plan: ConversionPlan, out: Path) -> None:
    """Everything but the shards, from plan and records; what is no part of it removed; the catalog last."""
    records = {shard.layout.file: read_json(_record_file(shard, out)) for shard in plan.shards}
    files = {file: FileRecord(record["nbytes"], record["sha256"]) for file, record in records.items()}

    def put(name: str, data: bytes) -> None:
        write_durably(out / name, data)
        files[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())

    for companion in plan.companions:
        put(companion.name, companion.read_bytes())
    put(layout.CONFIG_FILE, to_bytes(plan.config, indent=2))
    put(layout.INDEX_FILE, to_bytes(plan.index, indent=2))
    put(index.EXPERTS_FILE, index.to_bytes(_expert_rows(plan, records)))
    entries = [entry for shard in plan.shards for entry in records[shard.layout.file]["tensors"]]
    put(report.REPORT_FILE, report.to_bytes(plan, entries))
    for stale in (*out.glob(f"*{layout.SHARD_SUFFIX}"), *(out / name for name in COMPANIONS)):
        if stale.name not in files:
            stale.unlink(missing_ok=True)
    catalog = Catalog(plan.spec, plan.recipe.name, plan.recipe.digest, plan.fingerprint, plan.digest, files)
    catalog.write(out)


def _expert_rows(plan: ConversionPlan, records: dict[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Index rows of every routed expert of the decoder layers; a span and its scales are contiguous by layout."""
    rows: list[tuple[Any, ...]] = []
    for shard in plan.shards:
        experts: dict[int, list[Planned]] = {}
        for planned in shard.tensors:
            spec = planned.stored.spec
            if spec.role is Role.ROUTED_EXPERTS and spec.layer is not None and spec.expert is not None:
                experts.setdefault(spec.expert, []).append(planned)
        for expert, members in sorted(experts.items()):
            weights = [_span(shard, planned.stored.weight) for planned in members]
            scales = [_span(shard, planned.stored.scale) for planned in members if planned.stored.scale]
            crc = records[shard.layout.file]["crc32c"][expert]
            layer = members[0].stored.spec.layer
            rows.append((layer, expert, *index.place(shard.layout.file, weights, scales), crc))
    return sorted(rows)


def _span(shard: ShardPlan, entry: Entry) -> index.Span:
    return index.Span(entry.dtype, shard.layout.offsets[entry.name], entry.nbytes)


def _record_file(shard: ShardPlan, out: Path) -> Path:
    return out / layout.WORK_FOLDER / f"{shard.layout.file}.json"
