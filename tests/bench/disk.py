"""The ceiling of the disk: random pieces of a large file, read in parallel past the page cache: `just bench-disk FILE`.

By Python threads and os.preadv, not by Mosaic's reader, which is measured against this.
"""

import errno
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from mosaic.format.direct import aligned, aligned_size
from mosaic.format.errors import InputError
from mosaic.format.layout import PAGE
from mosaic.format.program import run_program

PIECE = 3 << 20  # an expert of the 35B
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    file: Annotated[Path, typer.Argument(help="On the disk in question; much larger than a piece: a shard.")],
    depth: Annotated[list[int], typer.Option(min=1, help="Reads at a time; may be repeated.")] = [1, 2, 4, 8, 16],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0.01, help="For one figure.")] = 0.5,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    piece: Annotated[int, typer.Option(min=1, help="Bytes of a read, rounded up to pages.")] = PIECE,
) -> None:
    """Measure the depths in turn, several times; medians in GB/s."""
    speeds: dict[int, list[float]] = {number: [] for number in depth}
    for _ in range(repetitions):
        for number, found in speeds.items():
            found.append(read_bandwidth(file, number, seconds, piece) / 1e9)
    print(f"{aligned_size(piece):,} bytes a read, {repetitions} repetitions of {seconds} s")
    print(f"{'depth':>5}{'GB/s':>8}{'min':>7}{'max':>7}")
    for number, found in speeds.items():
        print(f"{number:>5}{statistics.median(found):>8.2f}{min(found):>7.2f}{max(found):>7.2f}")


def read_bandwidth(file: Path, depth: int, seconds: float, piece: int = PIECE) -> float:
    """Bytes per second at which `depth` threads read pieces of a file, each into memory of its own.

    They begin at random pages. What is under way after so many seconds is read to its end and counted.
    """
    piece = aligned_size(piece)
    last_page = file.stat().st_size // PAGE - piece // PAGE
    if last_page < 0:
        remedy = "choose a larger file, much larger if the drive has memory of its own"
        raise InputError("the file is smaller than a piece", file=file, expected=f"{piece:,} bytes", remedy=remedy)
    memory = [aligned(piece)[:piece] for _ in range(depth)]
    for target in memory:
        target.fill(0)  # or the first read of each would wait for its pages
    done, start = [0] * depth, threading.Barrier(depth + 1)

    def read(number: int, descriptor: int) -> None:
        choose = random.Random(number)
        start.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            done[number] += os.preadv(descriptor, [memory[number].data], choose.randint(0, last_page) * PAGE)

    with _opened(file) as descriptor:
        threads = [threading.Thread(target=read, args=(number, descriptor)) for number in range(depth)]
        for thread in threads:
            thread.start()
        start.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
    return sum(done) / (time.perf_counter() - begin)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        remedy = "choose a file on a disk, not in memory"
        raise InputError("the file cannot be read past the page cache", file=file, remedy=remedy) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run_program(app)
