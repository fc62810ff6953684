"""The directory a conversion writes to: whether it may, alone, and whether there is room. Writes no result itself."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path

from mosaic.convert.plan import ConversionPlan
from mosaic.format import layout
from mosaic.format.catalog import CATALOG_FILE, read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json


class Standing(Enum):
    """What an OUT is before a conversion."""

    FREE = auto()  # nothing there, or begun by the same plan
    COMPLETE = auto()  # by the same plan
    OTHER = auto()  # by another plan


def may_write(plan: ConversionPlan, out: Path, overwrite: bool) -> Standing:
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


def clear(out: Path) -> None:
    """Remove what an earlier conversion wrote; its catalog first, so that nothing half is called complete."""
    work = out / layout.WORK_FOLDER
    files = sorted(read_catalog(out).files) if (out / CATALOG_FILE).is_file() else []
    records = sorted(work.glob("*.json"))
    for name in (CATALOG_FILE, *files, *(record.name.removesuffix(".json") for record in records)):
        (out / name).unlink(missing_ok=True)
    for file in (*records, *work.glob("*.partial")):
        file.unlink()


@contextmanager
def locked(out: Path) -> Iterator[None]:
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


def check_space(plan: ConversionPlan, out: Path, shard_bytes: int) -> None:
    """Refuse if the disk of OUT has no room for what is left to write."""
    companions = sum(file.stat().st_size for file in plan.companions)
    needed = shard_bytes + companions + sum(1000 for _ in plan.tensors)  # a tensor's share of report, index, record
    free = shutil.disk_usage(out).free
    if needed > free:
        raise InputError(
            "not enough room on the disk",
            file=out,
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            remedy="free some space, or choose an OUT on another disk",
        )
