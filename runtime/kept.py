"""Figures of this machine that are kept in the user's cache folder once they were measured.

A JSON object in each file, by what the figures are of. What cannot be read, or is damaged, was never measured; it is
put aside, not lost, when something is kept in its place.
"""

import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mosaic.format.jsonfile import to_bytes, write_durably
from mosaic.recipes import cache_folder


def recall(file: str, key: str) -> Any:
    """What was kept under a key; None if nothing was."""
    return (_all(cache_folder() / file) or {}).get(key)


def keep(file: str, key: str, figures: Mapping[str, object]) -> Path:
    """Keep figures beside those of other keys; the file's place. OSError if the folder cannot be written to.

    What is there and cannot be read is renamed to FILE.damaged, with a note on standard error.
    """
    place = try_to_keep(file)
    known = _all(place)
    if known is None:
        aside = place.replace(place.with_name(f"{file}.damaged"))
        print(f"note: {place} could not be read, and is now {aside.name}", file=sys.stderr)
    write_durably(place, to_bytes({**(known or {}), key: figures}, indent=1))
    return place


def try_to_keep(file: str) -> Path:
    """The file's place, in a folder that is there by now. OSError if `keep` could not write to it."""
    place = cache_folder() / file
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder", str(place))
    with TemporaryFile(dir=place.parent):
        return place


def _all(place: Path) -> dict[str, Any] | None:
    """By key; None if what is there cannot be read."""
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) else None
