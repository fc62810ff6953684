"""mosaic.json, the catalog: what a model directory is and that it is complete. Written last, by rename."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.layout import WORK_FOLDER
from mosaic.format.source import read_json
from mosaic.format.spec import ModelSpec

CATALOG_FILE = "mosaic.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 (hex) of one file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Catalog:
    """Everything mosaic.json says. `files` names every other file of the directory."""

    spec: ModelSpec
    recipe: str
    recipe_digest: str
    source_fingerprint: str
    plan_digest: str
    files: dict[str, FileRecord]

    def write(self, folder: Path) -> None:
        """Write the catalog durably; from then on the directory counts as complete."""
        value: dict[str, Any] = {"format_version": FORMAT_VERSION, **asdict(self)}
        write_json(folder / CATALOG_FILE, value)


def read_catalog(folder: Path) -> Catalog:
    """The catalog of a model directory; InputError if there is none or it is not one of ours."""
    file = folder / CATALOG_FILE
    if not file.is_file() and (folder / WORK_FOLDER).is_dir():
        raise InputError(
            "an unfinished conversion",
            file=folder,
            found=f"no {CATALOG_FILE}, but {WORK_FOLDER}",
            expected="a directory that mosaic-convert finished writing",
            remedy="run the same mosaic-convert command again: it goes on where it stopped",
        )
    if not file.is_file():
        raise InputError(
            "not a Mosaic model directory",
            file=folder,
            found=f"no {CATALOG_FILE}" if folder.is_dir() else "no such directory",
            expected="a directory that mosaic-convert finished writing",
            remedy=f"mosaic-convert {folder} OUT (official FP8 checkpoints pass through unchanged), then use OUT",
        )
    value = read_json(file)
    version = value.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise InputError(
            "a catalog of another format version",
            file=file,
            found=version,
            expected=FORMAT_VERSION,
            remedy="use the Mosaic that wrote it, or convert the checkpoint again",
        )
    try:
        return _parse(value)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            "not a sound catalog", file=file, found=error, remedy="convert the checkpoint again"
        ) from error


def _parse(value: dict[str, Any]) -> Catalog:
    fields = set(Catalog.__dataclass_fields__)
    if set(value) != fields:
        raise ValueError(f"keys {sorted(value)}, expected {sorted(fields)}")
    files: dict[str, FileRecord] = {}
    for name, record in value.pop("files").items():
        if name != Path(name).name or set(record) != {"nbytes", "sha256"} or type(record["nbytes"]) is not int:
            raise ValueError(f"file record {name}: {record}")
        files[name] = FileRecord(record["nbytes"], str(record["sha256"]))
    spec = ModelSpec.from_json(value.pop("spec"))
    return Catalog(spec=spec, files=files, **{key: str(entry) for key, entry in value.items()})


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON file durably: a temporary file beside it, fsync, rename."""
    write_durably(file, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_durably(file: Path, data: bytes) -> None:
    """Write a file so that after a crash it is there whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
