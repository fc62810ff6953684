"""What this machine can do at most, and what this process took of it: the figures that speeds are compared with."""

import ctypes
import os
import resource
import time
from pathlib import Path
from statistics import median

import numpy as np

from mosaic import _native
from mosaic.format.direct import aligned, aligned_size, open_direct
from mosaic.format.e4m3 import BLOCK
from mosaic.runtime.cgroup import cgroup_room

CEILING_BYTES = 1 << 30  # read per pass: several times what the caches of most machines hold
READ_DEPTH = 16  # reads of experts on their way at a time, and of those by which a disk is measured
CEILING_SHARE = 4  # at most one part in so many of the free memory
M_MMAP_THRESHOLD = -3  # <malloc.h>
LARGE_BLOCK = 1 << 20  # bytes; a row of logits stays below


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


def weight_speed(seconds: float, threads: int) -> float:
    """Bytes per second of E4M3 weights, in huge pages, that are multiplied with one vector: what decoding does."""
    columns = 2048
    rows = min(CEILING_BYTES, free_memory() // CEILING_SHARE) // columns // BLOCK * BLOCK
    codes = aligned(rows * columns)[: rows * columns].reshape(rows, columns)
    codes[:] = np.random.default_rng(0).integers(0x28, 0x48, columns, np.uint8)  # of moderate size
    scales = np.full((rows // BLOCK, columns // BLOCK), 0x3F80, np.uint16)  # bfloat16 ones
    matrix, x, y = _native.Matrix(codes, scales), np.ones((1, columns), np.float32), np.empty((1, rows), np.float32)
    _native.set_threads(threads)
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        _native.linear([matrix], x, [y])
        times.append(time.perf_counter() - start)
    return codes.nbytes / median(times)


def disk_speed(file: Path, span: int, seconds: float) -> float:
    """Bytes per second at which spans at random places of a file are read past the page cache, several at a time."""
    descriptor = open_direct(file, os.O_RDONLY)
    reader = _native.Reader(READ_DEPTH)
    try:
        places = max(os.fstat(descriptor).st_size // span, 1)
        memory = aligned(READ_DEPTH * aligned_size(span)).reshape(READ_DEPTH, -1)[:, :span]
        size, random = min(span, os.fstat(descriptor).st_size), np.random.default_rng()

        def submit(slot: int) -> int:
            return reader.submit(descriptor, int(random.integers(places)) * span, memory[slot, :size])

        slots = {submit(slot): slot for slot in range(READ_DEPTH)}
        start, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            for ticket in reader.wait(list(slots)):
                done += size
                slot = slots.pop(ticket)
                slots[submit(slot)] = slot
        return done / elapsed
    finally:
        reader.close()
        os.close(descriptor)


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


def major_faults() -> int:
    """Pages that this process touched and had to wait for the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def resident_memory() -> int:
    """Bytes of memory this process has resident."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS")


def total_memory() -> int:
    """Bytes of memory that this machine has."""
    return _kilobytes(Path("/proc/meminfo"), "MemTotal")


def free_memory() -> int:
    """Bytes that can be had without pushing anything but page cache out, nor leaving what a container is given."""
    available, room = _kilobytes(Path("/proc/meminfo"), "MemAvailable"), cgroup_room()
    return available if room is None else min(available, room)


def _kilobytes(file: Path, name: str) -> int:
    """The bytes of a line `name: number kB`."""
    lines = (line.split(":") for line in file.read_text().splitlines())
    return next(int(value.split()[0]) << 10 for key, value in lines if key == name)


def steady_heap() -> None:
    """Have the C library give large blocks back to the system when they are freed.

    By itself it moves them into its heap as the program goes on, where a long prompt left 3 KB of holes per token.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # GNU's
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
