"""mosaic-convert beside the floor that the disk sets: `just bench-convert`.

The floor is plain large sequential I/O of the same bytes on the same disk: read the source, write as many bytes as the
conversion does, 16 MiB at a time past the page cache. A copy through the page cache, as cp makes it, stands beside it.
Source files are evicted from the page cache before every run, as if it could not hold them.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.shape import model_config
from bench.write_source import write_source
from mosaic.format import direct
from mosaic.format.program import run_program
from support.memory import peak_memory

STEP = 16 << 20
PROGRAM = Path(sys.executable).with_name("mosaic-convert")
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path | None, typer.Argument(help="Where to work; a disk with some GB free.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the 35B's shape, 1.7 GB each.")] = 2,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    workers: Annotated[list[int], typer.Option(help="Worker counts to measure; may be repeated.")] = [1, 2],  # noqa: B006
    arguments: Annotated[list[str] | None, typer.Argument(help="Further options of mosaic-convert, after --.")] = None,
) -> None:
    """Measure floor, plain copy and conversions in turn, several times; medians."""
    work = Path(tempfile.mkdtemp(prefix="bench-convert.", dir=folder))
    try:
        source, out = work / "source", work / "out"
        write_source(source, model_config(layers, 512), seed=0, quiet=True)
        nbytes_in = _size(source)
        memory: dict[str, int] = {}

        def convert(count: int) -> None:
            command = [str(PROGRAM), str(source), str(out), "--quiet", "--workers", str(count), *(arguments or [])]
            memory[f"convert, {count} worker(s)"] = peak_memory(*command)

        convert(max(workers))
        nbytes_out = _size(out)
        shutil.rmtree(out)
        runs: dict[str, Callable[[], None]] = {
            "floor (direct I/O)": lambda: _copy(source, out, nbytes_out, direct=True),
            "plain copy (page cache)": lambda: _copy(source, out, nbytes_out, direct=False),
            **{f"convert, {count} worker(s)": lambda count=count: convert(count) for count in workers},
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repetitions):
            for name, run in runs.items():
                evict(source)
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
                shutil.rmtree(out) if out.is_dir() else out.unlink()
        print(f"{layers} layers: {nbytes_in / 1e9:.2f} GB in, {nbytes_out / 1e9:.2f} GB out, {repetitions} repetitions")
        print(f"{'':<26}{'median s':>9}{'min':>7}{'max':>7}{'GB/s in':>9}{'GB/s out':>9}{'/ floor':>9}{'peak MB':>9}")
        floor = statistics.median(seconds["floor (direct I/O)"])
        for name, times in seconds.items():
            median = statistics.median(times)
            speeds = f"{nbytes_in / median / 1e9:>9.2f}{nbytes_out / median / 1e9:>9.2f}{median / floor:>9.2f}"
            peak = f"{memory[name] / 1e6:>9.0f}" if name in memory else ""
            print(f"{name:<26}{median:>9.2f}{min(times):>7.2f}{max(times):>7.2f}{speeds}{peak}", flush=True)
    finally:
        shutil.rmtree(work)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def evict(folder: Path) -> None:
    """Write the files of a folder out and take them from the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _copy(source: Path, out: Path, nbytes: int, *, direct: bool) -> None:
    """Read every file of `source`, then write `nbytes` to `out`, and make them durable."""
    flag = os.O_DIRECT if direct else 0
    buffer = _BUFFER.data
    for file in sorted(source.iterdir()):
        descriptor = os.open(file, os.O_RDONLY | flag)
        while os.readv(descriptor, [buffer]) == STEP:
            pass
        os.close(descriptor)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | flag, 0o666)
    for _ in range(-(-nbytes // STEP)):
        os.write(descriptor, buffer)
    os.fsync(descriptor)
    os.close(descriptor)


_BUFFER = direct.aligned(STEP)

if __name__ == "__main__":
    run_program(app)
