"""Carries a plan out: shards in parallel, each slice by slice, then index, report and catalog from their records.

Work in progress lies in OUT/.mosaic-convert: a `.partial` file per shard being written and a record per finished one,
renamed into place before its shard. A run that was stopped is resumed by running the same command again and writes
the same bytes; the catalog comes last, so its presence means complete.
"""

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mosaic.convert import report
from mosaic.convert.plan import ConversionPlan, Planned, ShardPlan
from mosaic.convert.tensor import TensorConversion
from mosaic.format import index, layout
from mosaic.format.catalog import CATALOG_FILE, Catalog, FileRecord, read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.format.shard import ShardWriter
from mosaic.format.tensors import Role

RECORD_VERSION = 1


class Standing(Enum):
    """What an OUT is before a conversion."""

    FREE = auto()  # nothing there, or begun by the same plan
    COMPLETE = auto()  # by the same plan
    OTHER = auto()  # by another plan


def convert(plan: ConversionPlan, out: Path, *, workers: int, overwrite: bool, quiet: bool) -> bool:
    """Write the model directory; False if it was already there, complete and by the same plan."""
    if _may_write(plan, out, overwrite) is Standing.COMPLETE:
        return False
    with _locked(out):
        standing = _may_write(plan, out, overwrite)  # again: another process may have been at work until now
        if standing is not Standing.COMPLETE:
            if standing is Standing.OTHER:
                _clear(out)
            done = [shard for shard in plan.shards if _finished(plan, shard, out)]
            left = [shard for shard in plan.shards if shard not in done]
            _check_space(plan, out, sum(shard.layout.nbytes for shard in left))
            with tqdm(total=plan.tensor_bytes, unit="B", unit_scale=True, disable=quiet or None, desc="convert") as bar:
                bar.update(sum(entry.nbytes for shard in done for entry in shard.layout.entries))
                _run(plan, left, out, workers, bar)
            _complete(plan, out)
        shutil.rmtree(out / layout.WORK_FOLDER)
    return standing is not Standing.COMPLETE


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
    file, record = out / shard.layout.file, _record_file(shard, out)
    if not file.is_file() or not record.is_file():
        return False
    value = read_json(record)
    return (value.get("version"), value.get("plan"), value.get("nbytes")) == (
        RECORD_VERSION,
        plan.digest,
        file.stat().st_size,
    )


def _complete(plan: ConversionPlan, out: Path) -> None:
    """Everything but the shards, from plan and records; the catalog last."""
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
            weights = [planned.stored.weight for planned in members]
            scales = [planned.stored.scale for planned in members if planned.stored.scale]
            rows.append(
                (
                    members[0].stored.spec.layer,
                    expert,
                    shard.layout.file,
                    weights[0].dtype,
                    scales[0].dtype if scales else index.NO_SCALES,
                    shard.layout.offsets[weights[0].name],
                    *(weight.nbytes for weight in weights),
                    shard.layout.offsets[scales[0].name] if scales else 0,
                    sum(scale.nbytes for scale in scales),
                    records[shard.layout.file]["crc32c"][expert],
                )
            )
    return sorted(rows)


def _may_write(plan: ConversionPlan, out: Path, overwrite: bool) -> Standing:
    """What OUT is; refuses a directory that is not ours, or not to be replaced. Changes nothing."""
    source = plan.checkpoint.folder.resolve()
    if source == out.resolve() or source in out.resolve().parents:
        raise InputError("OUT lies in the checkpoint", file=out, remedy="choose another directory for OUT")
    if out.is_symlink() and not out.exists():
        raise InputError("OUT is a link to nothing", file=out, remedy="remove the link, or choose another OUT")
    if out.exists() and not out.is_dir():
        raise InputError("OUT is a file", file=out, expected="a directory, or nothing", remedy="choose another OUT")
    standing = _standing(plan, out)
    if standing is Standing.OTHER and not overwrite:
        raise InputError(
            "OUT holds the result of another conversion",
            file=out,
            found="another source, recipe or option",
            expected="the same ones, or an empty directory",
            remedy="choose another OUT, or give --overwrite to replace it",
        )
    return standing


def _standing(plan: ConversionPlan, out: Path) -> Standing:
    work = out / layout.WORK_FOLDER
    if (out / CATALOG_FILE).is_file():
        return Standing.COMPLETE if read_catalog(out).plan_digest == plan.digest else Standing.OTHER
    if work.is_dir():
        plans = {read_json(record).get("plan") for record in work.glob("*.json")}
        return Standing.FREE if plans <= {plan.digest} else Standing.OTHER
    if out.is_dir() and any(out.iterdir()):
        raise InputError(
            "OUT holds something else",
            file=out,
            found=", ".join(sorted(path.name for path in out.iterdir())[:5]),
            expected="an empty directory, or one that mosaic-convert wrote",
            remedy="choose another OUT, or empty this one",
        )
    return Standing.FREE


def _clear(out: Path) -> None:
    """Remove what an earlier conversion wrote; its catalog first, so that nothing half is called complete."""
    work = out / layout.WORK_FOLDER
    files = sorted(read_catalog(out).files) if (out / CATALOG_FILE).is_file() else []
    records = sorted(work.glob("*.json"))
    for name in (CATALOG_FILE, *files, *(record.name.removesuffix(".json") for record in records)):
        (out / name).unlink(missing_ok=True)
    for file in (*records, *work.glob("*.partial")):
        file.unlink()


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One converter at a time for an OUT."""
    file = out / layout.WORK_FOLDER / "lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a")
    except OSError as error:
        raise InputError(
            "cannot write to OUT", file=out, found=error.strerror, remedy="choose an OUT you may write to"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = file.is_file() and os.path.samestat(os.fstat(lock.fileno()), file.stat())
        except BlockingIOError:
            held = False
        if not held:  # taken, or removed by the one who had it
            raise InputError(
                "another mosaic-convert is writing to OUT", file=out, remedy="wait for it, or stop it and run again"
            )
        yield


def _check_space(plan: ConversionPlan, out: Path, shard_bytes: int) -> None:
    companions = sum(file.stat().st_size for file in plan.companions)
    needed = shard_bytes + companions + sum(400 for _ in plan.tensors)  # a tensor's share of report, index, record
    free = shutil.disk_usage(out).free
    if needed > free:
        raise InputError(
            "not enough room on the disk",
            file=out,
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            remedy="free some space, or choose an OUT on another disk",
        )


def _record_file(shard: ShardPlan, out: Path) -> Path:
    return out / layout.WORK_FOLDER / f"{shard.layout.file}.json"
