"""What a control group leaves this process to take: the limit of a container or of a systemd scope, if there is one."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
#: Page cache, in this group; and with those below it, where version 1 counts them apart.
CACHE = (("active_file", "inactive_file"), ("total_active_file", "total_inactive_file"))


def cgroup_room(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that can still be had within the tightest of the limits above this process; None without any."""
    rooms = [
        max(limit - max(used - _reclaimable(folder), 0), 0)
        for folder, names in _folders(root, own)
        if (limit := _number(folder / names[0])) is not None and (used := _number(folder / names[1])) is not None
    ]
    return min(rooms, default=None)


def _folders(root: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The groups that this process is in, with the names of their limit and use: of version 2, and of version 1."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in lines:
        if number == "0":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = Path(path).parts[1:]
        for count in range(len(parts) + 1):  # in a container the path may be the host's: what is not there is no limit
            yield top.joinpath(*parts[:count]), names


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or the word max
        return None


def _reclaimable(folder: Path) -> int:
    try:
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        figures = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0
    return max(sum(figures.get(name, 0) for name in names) for names in CACHE)
