"""mosaic.json, the catalog: what a model directory is and that it is complete. Written last, by rename."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.format.layout import WORK_FOLDER
from mosaic.format.source import plain_name
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
        value: dict[str, Any] = {"format_version": FORMAT_VERSION, **asdict(self), "spec": self.spec.to_json()}
        write_durably(folder / CATALOG_FILE, to_bytes(value, indent=1))


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
    if not folder.is_dir():
        raise InputError(
            "no such model directory",
            file=folder,
            found="a file" if folder.exists() else "nothing",
            expected="a directory that mosaic-convert finished writing",
            remedy="check the path, and that OUT comes first",
        )
    if not file.is_file():
        raise InputError(
            "not a Mosaic model directory",
            file=folder,
            found=f"no {CATALOG_FILE}",
            expected="a directory that mosaic-convert finished writing",
            remedy=f"mosaic-convert {folder} OUT (official FP8 checkpoints pass through unchanged), then use OUT",
        )
    value = read_json(file)
    version = value.pop("format_version", None)
    if type(version) is not int or version != FORMAT_VERSION:
        raise InputError(
            "a catalog of another format version",
            file=file,
            found=version,
            expected=FORMAT_VERSION,
            remedy="use the Mosaic that wrote it, or convert the checkpoint again",
        )
    try:
        return _parse(value)
    except ValueError as error:
        raise InputError(
            "not a sound catalog", file=file, found=error, remedy="convert the checkpoint again"
        ) from error


def _parse(value: dict[str, Any]) -> Catalog:
    fields = set(Catalog.__dataclass_fields__)
    if set(value) != fields:
        raise ValueError(f"keys {sorted(value)}, expected {sorted(fields)}")
    if not isinstance(value["files"], dict):
        raise ValueError(f"files: {value['files']!r:.60}, expected an object")
    files = {name: _file_record(name, record) for name, record in value.pop("files").items()}
    spec = ModelSpec.from_json(value.pop("spec"))
    for key, entry in value.items():
        if not isinstance(entry, str):
            raise ValueError(f"{key}: {entry!r:.60}, expected a string")
    return Catalog(spec=spec, files=files, **value)


def _file_record(name: str, record: object) -> FileRecord:
    if not plain_name(name):
        raise ValueError(f"files: {name!r} is not the name of a file in this directory")
    if isinstance(record, dict) and set(record) == {"nbytes", "sha256"}:
        nbytes, sha256 = record["nbytes"], record["sha256"]
        if type(nbytes) is int and nbytes >= 0 and isinstance(sha256, str):
            return FileRecord(nbytes, sha256)
    raise ValueError(f"files: {name}: {record!r:.80}, expected nbytes and sha256")
