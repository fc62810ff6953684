"""What this machine can do at most, and what this process took of it: the figures that speeds are compared with."""

import os
from pathlib import Path

from mosaic import _native
from mosaic.format.direct import aligned

CEILING_BYTES = 1 << 30  # read per pass: several times what the caches of most machines hold
CGROUP = Path("/sys/fs/cgroup")  # of this container, if it is one
CEILING_SHARE = 4  # at most one part in so many of the free memory


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def read_ceiling(seconds: float, threads: int) -> float:
    """Bytes per second at which so many threads read memory in huge pages, once through; about that many seconds.

    The memory, 1 GiB or a quarter of what is free, is given back: read the peak of this process before, not after.
    """
    memory = aligned(min(CEILING_BYTES, free_memory() // CEILING_SHARE))
    memory.fill(1)  # untouched memory is one page of zeros, seen many times
    _native.set_threads(threads)
    return _native.read_bandwidth(memory, seconds)


def multiply_add_peak(seconds: float, threads: int) -> float:
    """Float32 operations per second of multiply-adds in registers, by the active instruction set."""
    _native.set_threads(threads)
    return _native.multiply_add_peak(seconds)


def bf16_dot_peak(seconds: float, threads: int) -> float:
    """The same of dot products of bfloat16 pairs; 0 if the instruction set has none."""
    _native.set_threads(threads)
    return _native.bf16_dot_peak(seconds)


def peak_rss() -> int:
    """Most bytes of memory this process ever had resident, mapped weights among them."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM")


def resident_memory() -> int:
    """Bytes of memory this process has resident."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS")


def free_memory() -> int:
    """Bytes that can be had without pushing anything but page cache out, nor leaving what a container is given."""
    available = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    try:
        limit = int((CGROUP / "memory.max").read_text())  # or the word max
        return min(available, max(limit - int((CGROUP / "memory.current").read_text()), 0))
    except (OSError, ValueError):
        return available


def _kilobytes(file: Path, name: str) -> int:
    """The bytes of a line `name: number kB`."""
    lines = (line.split(":") for line in file.read_text().splitlines())
    return next(int(value.split()[0]) << 10 for key, value in lines if key == name)
