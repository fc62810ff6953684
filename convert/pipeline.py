"""Carries a plan out: shards in parallel, then index, report and catalog from their records.

Work in progress lies in OUT/.mosaic-convert: a `.partial` file per shard being written and a record per finished one,
renamed into place before its shard. A run that was stopped is resumed by running the same command again and writes
the same bytes; the catalog comes last, so its presence means complete. Several processes, on several machines, may
each convert some of the layers; then one finishes.
"""

import hashlib
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mosaic.convert import report
from mosaic.convert.plan import COMPANIONS, ConversionPlan, Planned, ShardPlan
from mosaic.convert.quantize import check_kernels
from mosaic.convert.shard import READERS, RECORD_VERSION, ShardConversion, record_file
from mosaic.convert.target import Standing, check_space, clear, locked, may_write, read_record
from mosaic.format import index, layout
from mosaic.format.catalog import Catalog, FileRecord
from mosaic.format.errors import InputError
from mosaic.format.evaluation import EVALUATION_FILE
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.format.layout import Entry
from mosaic.format.tensors import Role


def convert(
    plan: ConversionPlan,
    out: Path,
    *,
    workers: int,
    overwrite: bool = False,
    quiet: bool = False,
    layers: range | None = None,
    finish: bool = False,
) -> bool:
    """Write the model directory; False if it was already there, complete and by the same plan.

    With `overwrite`, a directory of another plan, or a damaged or complete one of this plan, is written anew. With
    `layers`, only the shards of these decoder layers are written, and others may be at work on other layers. With
    `finish`, all layers must be there; what is left is written.
    """
    check_kernels()
    assert not (overwrite and (layers or finish)), "shares and --finish replace nothing"
    shards = [shard for shard in plan.shards if layers is None or shard.layer in layers]
    standing = may_write(plan, out, overwrite)
    if standing is Standing.COMPLETE and not (out / layout.WORK_FOLDER).exists():
        return False
    try:
        if standing is not Standing.COMPLETE:
            if finish:
                _check_layers(plan, out)
            check_space(plan, out, standing, _left(plan, shards, out))
        with locked(out, layers):
            standing = may_write(plan, out, overwrite)  # again: another process may have been at work until now
            if finish and standing is not Standing.COMPLETE:
                _check_layers(plan, out)
            if standing is not Standing.COMPLETE:
                if standing is Standing.OTHER:
                    clear(out)
                _write(plan, _left(plan, shards, out), out, workers, quiet)
                if layers is None:
                    _complete(plan, out)
            if layers is None or standing is Standing.COMPLETE:
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


def missing_layers(plan: ConversionPlan, out: Path) -> list[int]:
    """The decoder layers that no run has written yet."""
    return [shard.layer for shard in _left(plan, plan.shards, out) if shard.layer is not None]


def _check_layers(plan: ConversionPlan, out: Path) -> None:
    if missing := missing_layers(plan, out):
        raise InputError(
            "layers are missing",
            file=out,
            found=f"no layers {spans(missing)}",
            expected="all layers, written by this version from this checkpoint, with this recipe",
            remedy="convert these first: --layers FIRST:END for each, or run without --finish",
        )


def spans(numbers: list[int]) -> str:
    """Ascending numbers as half-open spans: 0:3, 7:8."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number + 1 for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))


def _left(plan: ConversionPlan, shards: Iterable[ShardPlan], out: Path) -> list[ShardPlan]:
    """Those of the shards that are still to be written."""
    return [shard for shard in shards if not _finished(plan, shard, out)]


def _write(plan: ConversionPlan, left: list[ShardPlan], out: Path, workers: int, quiet: bool) -> None:
    """Write shards, the largest first. An error or Ctrl-C stops all of them at their next slice."""
    stop, counting = threading.Event(), threading.Lock()
    total = sum(entry.nbytes for shard in left for entry in shard.layout.entries)
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None, desc="convert") as bar,
        ThreadPoolExecutor(READERS * workers, "read") as readers,
        ThreadPoolExecutor(workers, "convert") as pool,
    ):

        def progress(nbytes: int) -> None:
            with counting:
                bar.update(nbytes)

        def write(shard: ShardPlan) -> None:
            ShardConversion(plan, shard, out, workers, progress).run(readers, stop)

        try:
            largest_first = sorted(left, key=lambda shard: -shard.layout.nbytes)
            futures = [pool.submit(write, shard) for shard in largest_first]
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            readers.shutdown(cancel_futures=True)


def _finished(plan: ConversionPlan, shard: ShardPlan, out: Path) -> bool:
    """Whether a shard and its record are there, by this plan."""
    file = out / shard.layout.file
    record = read_record(record_file(out, shard.layout.file))
    wanted = (RECORD_VERSION, plan.digest, file.stat().st_size if file.is_file() else None)
    return (record.get("version"), record.get("plan"), record.get("nbytes")) == wanted


def _complete(plan: ConversionPlan, out: Path) -> None:
    """Everything but the shards, from plan and records; what is no part of it removed; the catalog last."""
    records = {shard.layout.file: read_json(record_file(out, shard.layout.file)) for shard in plan.shards}
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
    histograms = [row for shard in plan.shards for row in records[shard.layout.file]["histograms"]]
    put(report.REPORT_FILE, report.to_bytes(report.value(report.head(plan), entries, histograms)))
    ours = (*COMPANIONS, report.HTML_FILE, EVALUATION_FILE)
    for stale in (*out.glob(f"*{layout.SHARD_SUFFIX}"), *(out / name for name in ours)):
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
