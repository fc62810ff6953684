"""The directory a conversion writes to: whether it may, alone, and whether there is room. Writes no result itself."""

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

from mosaic.convert.plan import COMPANIONS, ConversionPlan, ShardPlan
from mosaic.convert.report import REPORT_FILE
from mosaic.convert.shard import partial_file
from mosaic.format import index, layout
from mosaic.format.catalog import CATALOG_FILE, Catalog, read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, temporary_of

#: What a conversion writes beside shards and companions.
WRITTEN = (layout.CONFIG_FILE, layout.INDEX_FILE, index.EXPERTS_FILE, REPORT_FILE, CATALOG_FILE)


class Standing(Enum):
    """What an OUT is before a conversion."""

    FREE = auto()  # nothing there, or begun by the same plan
    COMPLETE = auto()  # by the same plan
    OTHER = auto()  # by another plan, or damaged: may be replaced if that is wished


def check_place(plan: ConversionPlan, out: Path) -> None:
    """Refuse an OUT that cannot be a model directory, whatever it holds. Changes nothing."""
    try:
        out.resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(
            "OUT is a path that leads nowhere", file=out, found=error, remedy="choose another OUT"
        ) from error
    source = plan.checkpoint.folder.resolve()
    if source == out.resolve() or source in out.resolve().parents:
        raise InputError(
            "OUT lies in the checkpoint",
            file=out,
            found=f"the checkpoint {source}",
            expected="a directory outside it",
            remedy="choose another directory for OUT",
        )
    if out.is_symlink() and not out.exists():
        raise InputError(
            "OUT is a link to nothing",
            file=out,
            found=out.readlink(),
            expected="a directory, or nothing",
            remedy="remove the link, or choose another OUT",
        )
    if out.exists() and not out.is_dir():
        raise InputError(
            "OUT is a file", file=out, found="a file", expected="a directory, or nothing", remedy="choose another OUT"
        )


def may_write(plan: ConversionPlan, out: Path, overwrite: bool) -> Standing:
    """What OUT is; refuses a directory that is not ours, or not to be replaced. Changes nothing."""
    check_place(plan, out)
    standing = _standing(plan, out)
    _check_strangers(out)
    if standing is Standing.COMPLETE and overwrite:
        return Standing.OTHER
    if standing is Standing.OTHER and not overwrite:
        raise InputError(
            "OUT holds the result of another conversion, or a damaged one",
            file=out,
            found="another source, recipe or option; or files that the catalog does not describe",
            expected="the same ones, whole, or an empty directory",
            remedy="choose another OUT, or give --overwrite to write it anew (before --layers: remove OUT)",
        )
    return standing


def _standing(plan: ConversionPlan, out: Path) -> Standing:
    if (out / CATALOG_FILE).is_file():
        catalog = _catalog(out)
        whole = catalog and all(_size(out / name) == record.nbytes for name, record in catalog.files.items())
        return Standing.COMPLETE if catalog and whole and catalog.plan_digest == plan.digest else Standing.OTHER
    if (out / layout.WORK_FOLDER).is_dir():
        plans = {read_record(record).get("plan", plan.digest) for record in _records(out)}
        return Standing.FREE if plans <= {plan.digest} else Standing.OTHER
    if out.is_dir() and (names := sorted(path.name for path in out.iterdir())):
        if CATALOG_FILE in names:  # another process finished while we looked
            return _standing(plan, out)
        raise InputError(
            "OUT holds something else",
            file=out,
            found=", ".join(names[:5]),
            expected="an empty directory, or one that mosaic-convert wrote",
            remedy="choose another OUT",
        )
    return Standing.FREE


def _check_strangers(out: Path) -> None:
    """Refuse safetensors files of somebody else: they could not stay, since engines would load them."""
    catalog = _catalog(out)
    ours = set(catalog.files) if catalog else set()
    names = sorted(file.name for file in out.glob(f"*{layout.SHARD_SUFFIX}") if file.name not in ours)
    if strangers := [name for name in names if not layout.is_shard_name(name)]:
        raise InputError(
            "OUT holds safetensors files that Mosaic did not write",
            file=out,
            found=", ".join(strangers[:5]),
            expected="none: engines load every such file",
            remedy="move them elsewhere, or choose another OUT",
        )


def read_record(file: Path) -> dict[str, Any]:
    """The record of a shard; empty if there is none that can be read, so that the shard is written again."""
    try:
        return read_json(file) if file.is_file() else {}
    except InputError:
        return {}


def clear(out: Path) -> None:
    """Remove what an earlier conversion wrote; its catalog first, so that nothing half is called complete."""
    for file in _earlier(out):
        file.unlink(missing_ok=True)


def _earlier(out: Path) -> list[Path]:
    """The files of an earlier conversion, the catalog first, shards before their records."""
    catalog = _catalog(out)
    shards = [out / record.name.removesuffix(".json") for record in _records(out)]
    written = [out / name for name in catalog.files] if catalog else [*out.glob(f"*{layout.SHARD_SUFFIX}")]
    begun = [temporary_of(out / name) for name in (*COMPANIONS, *WRITTEN)]
    return [out / CATALOG_FILE, *written, *shards, *_records(out), *_partials(out), *begun]


def _records(out: Path) -> list[Path]:
    return sorted((out / layout.WORK_FOLDER).glob("*.json"))


def _partials(out: Path) -> list[Path]:
    return sorted((out / layout.WORK_FOLDER).glob("*.partial"))


def _catalog(out: Path) -> Catalog | None:
    """The catalog of OUT; None if there is none that this version can read."""
    try:
        return read_catalog(out)
    except InputError:
        return None


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


@contextmanager
def locked(out: Path, layers: range | None) -> Iterator[None]:
    """One converter at a time for a layer of OUT, and for all of it where `layers` is None.

    A lock on bytes of one file, byte for layer, which also holds between machines on a common file system. It belongs
    to the open file (OFD), so the system lets go of it with the process.
    """
    file = out / layout.WORK_FOLDER / "lock"
    first, count = (layers.start, len(layers)) if layers else (0, 0)  # 0 bytes: up to the end, wherever that is
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a")
    except FileNotFoundError as error:  # removed by one who finished just now
        raise _at_work(out, layers) from error
    except OSError as error:
        raise InputError(
            "cannot write to OUT", file=out, found=error.strerror, remedy="choose an OUT you may write to"
        ) from error
    with lock:
        try:
            request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, request)
            held = file.is_file() and os.path.samestat(os.fstat(lock.fileno()), file.stat())
        except (BlockingIOError, PermissionError):
            held = False
        except OSError as error:
            raise InputError(
                "the file system of OUT has no file locks",
                file=out,
                found=error.strerror,
                expected="locks, so that two converters do not write the same shard",
                remedy="mount it with locks (Lustre: option flock), or choose an OUT elsewhere",
            ) from error
        if not held:  # taken, or removed by the one who had it
            raise _at_work(out, layers)
        yield


def _at_work(out: Path, layers: range | None) -> InputError:
    return InputError(
        "another mosaic-convert is writing to OUT",
        file=out,
        found="it is at work on some of the same layers" if layers else "it is at work on some of the layers",
        expected="nobody else",
        remedy="wait for it, or stop it and run again",
    )


def check_space(plan: ConversionPlan, out: Path, standing: Standing, left: list[ShardPlan]) -> None:
    """Refuse if the disk of OUT has no room for the shards that are left to write. Changes nothing."""
    unfinished = [partial_file(out, shard.layout.file) for shard in left]
    replaced = _earlier(out) if standing is Standing.OTHER else unfinished
    free = free_space(out) + sum(_size(file) or 0 for file in set(replaced))
    needed = needed_space(plan, left)
    if needed > free:
        raise InputError(
            "not enough room on the disk",
            file=out,
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            remedy="free some space, or choose an OUT on another disk",
        )


def needed_space(plan: ConversionPlan, shards: list[ShardPlan]) -> int:
    """Bytes that these shards take, and all that is written beside them."""
    companions = sum(file.stat().st_size for file in plan.companions)
    # Of a tensor: about 1.3 kB in report, index and record.
    return sum(shard.layout.nbytes for shard in shards) + companions + sum(1300 for _ in plan.tensors)


def free_space(out: Path) -> int:
    """Free bytes on the disk where OUT is or would be."""
    return shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())).free
