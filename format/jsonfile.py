"""JSON files, read with suspicion; and files written so that after a crash they are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: ValueError for a key that stands twice, which json would silently drop."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return table


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError if it is none."""
    if file.exists() and not file.is_file():
        raise _refused("not a file", file, "a directory or a device")
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise _refused("cannot read a file", file, error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _refused("not a sound JSON file", file, error) from error
    if not isinstance(value, dict):
        raise _refused("not a JSON object", file, type(value).__name__)
    return value


def _refused(problem: str, file: Path, found: object) -> InputError:
    remedy = "copy, download or convert it again"
    return InputError(problem, file=file, found=found, expected="a JSON object", remedy=remedy)


def to_bytes(value: dict[str, Any], indent: int) -> bytes:
    """A JSON file's bytes, ASCII only: any string that was read can be written."""
    return (json.dumps(value, indent=indent) + "\n").encode("ascii")


def temporary_of(file: Path) -> Path:
    """Where a file is while it is written."""
    return file.with_name(f".{file.name}.tmp")


def write_durably(file: Path, data: bytes) -> None:
    """Write a file by way of a temporary one beside it: fsync, then rename."""
    temporary = temporary_of(file)
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        rename_durably(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def rename_durably(temporary: Path, final: Path) -> None:
    """Rename within a disk, and make the new name survive a power cut."""
    temporary.replace(final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
