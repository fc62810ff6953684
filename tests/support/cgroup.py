"""A memory limit for a process and its children, page cache included: a control group of its own. Needs root."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited(nbytes: int) -> Iterator[Callable[[], None]]:
    """What a child calls before exec (`preexec_fn`) to be limited. OSError where groups cannot be made.

    Of version 1 where its memory controller is mounted, else of version 2.
    """
    first = ROOT / "memory" / "memory.limit_in_bytes"
    top, name = (ROOT / "memory", "memory.limit_in_bytes") if first.exists() else (ROOT, "memory.max")
    folder = top / f"mosaic-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / name).write_text(str(nbytes))
        yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        folder.rmdir()
