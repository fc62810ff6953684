"""A C library's pread that a test holds, cuts short or lets fail: tests/support/pread.c, loaded before Python is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("pread.c")
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
needs_pread = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="programs load the other build"),
]


def build_pread(folder: Path) -> Path:
    """The library, to be named in LD_PRELOAD."""
    library = folder / "pread.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    return library
