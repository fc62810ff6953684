"""What Mosaic uses of google-crc32c, for machines that have a C compiler but not that package."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("crc32c.c")
BUILT = Path(__file__).parents[3] / "build" / "device" / "crc32c.so"


def _load() -> ctypes.CDLL:
    if not BUILT.exists() or BUILT.stat().st_mtime < SOURCE.stat().st_mtime:
        BUILT.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT.parent) as folder:  # several processes may be the first
            made = Path(folder) / BUILT.name
            subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True)
            made.replace(BUILT)
    library = ctypes.CDLL(str(BUILT))
    library.extend.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    library.extend.restype = ctypes.c_uint32
    return library


_library = _load()


def extend(crc: int, data: NDArray[np.uint8]) -> int:
    """The checksum of what had `crc`, followed by this."""
    data = np.ascontiguousarray(data)
    return int(_library.extend(crc, data.ctypes.data, data.nbytes))
