"""What was typed in earlier chats: one JSON string a line, readable by its owner only."""

import json
import os
from pathlib import Path

from mosaic.format.jsonfile import write_durably

MOST = 1000  # entries that are kept


def history_file() -> Path:
    """Where it is kept for this user; it may not exist yet."""
    wished = os.environ.get("XDG_STATE_HOME", "")
    return Path(wished if Path(wished).is_absolute() else Path.home() / ".local" / "state") / "mosaic" / "history"


def read_history(file: Path) -> list[str]:
    """The entries, oldest first; lines that are none are passed over. Shortens a file that has grown too long."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)
        if len(lines) > 2 * MOST:
            write_durably(file, b"".join(lines[-MOST:]))
            file.chmod(0o600)
    except OSError:
        return []
    entries = []
    for line in lines[-MOST:]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            entries.append(entry)
    return entries


def add_to_history(file: Path, text: str) -> None:
    """Add an entry. OSError where that is not possible."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(descriptor, 0o600)
        stream.write(json.dumps(text).encode("ascii") + b"\n")
