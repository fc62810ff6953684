"""Figures of this machine that are kept in the user's cache folder once they were measured.

A JSON object in each file, by what the figures are of. What cannot be read, or is damaged, was never measured.
"""

import json
from collections.abc import Mapping
from typing import Any

from mosaic.format.jsonfile import to_bytes, write_durably
from mosaic.recipes import cache_folder


def recall(file: str, key: str) -> Any:
    """What was kept under a key; None if nothing was."""
    return _all(file).get(key)


def keep(file: str, key: str, figures: Mapping[str, object]) -> None:
    """Keep figures beside those of other keys. OSError if the folder cannot be written to."""
    place = cache_folder() / file
    place.parent.mkdir(parents=True, exist_ok=True)
    write_durably(place, to_bytes({**_all(file), key: figures}, indent=1))


def _all(file: str) -> dict[str, Any]:
    try:
        known = json.loads((cache_folder() / file).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
