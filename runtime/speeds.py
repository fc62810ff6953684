"""How fast this machine brings weights to the arithmetic, from memory and from the disk: measured once, then kept.

What `mosaic-run --plan` foresees is made of these and of the bytes that a token needs. They are kept in the user's
cache folder, per machine, disk and number of threads; delete the file to measure again.
"""

import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mosaic.runtime import machine
from mosaic.runtime.kept import keep, recall
from mosaic.runtime.ops.cpu import isa

SPEEDS_FILE = "speeds.json"
SECONDS = 2.0  # for each of the two


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: E4M3 weights multiplied with one vector, from memory; and random spans read from the disk."""

    weights: float
    disk: float


def speeds(file: Path, span: int, threads: int) -> Speeds:
    """Of this machine, and of the disk that `file` is on, read in spans of so many bytes."""
    if known := known_speeds(file, span, threads):
        return known
    found = Speeds(machine.weight_speed(SECONDS, threads), machine.disk_speed(file, span, SECONDS))
    with suppress(OSError):  # a folder that cannot be written to: measured again next time
        keep(SPEEDS_FILE, _key(file, span, threads), asdict(found))
    return found


def known_speeds(file: Path, span: int, threads: int) -> Speeds | None:
    """The same if they were measured before."""
    match recall(SPEEDS_FILE, _key(file, span, threads)):
        case {"weights": float(weights), "disk": float(disk)}:
            return Speeds(weights, disk)
    return None


def _key(file: Path, span: int, threads: int) -> str:
    return f"{platform.node()}, {isa()}, {threads} threads, device {file.stat().st_dev}, spans of {span} bytes"
