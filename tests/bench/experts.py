"""The routed experts of one layer of the 35B alone, beside kt-kernel and what the memory gives.

Every pass takes other experts at random, so that none is in the cache (but for caches of hundreds of MB). The machine
should be idle.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.engine_worker import Worker
from mosaic import _native
from mosaic.format.direct import aligned
from mosaic.format.program import run_program
from mosaic.runtime import machine

TOP_K, HIDDEN, INNER, BLOCK = 8, 2048, 512, 128
NBYTES = 3 * HIDDEN * INNER
SCALE = 0x3C00  # 2^-7 in bfloat16
PASSES = 4  # in a row; the last one counts: threads are awake and the page tables known by then
KT_VARIANTS = ("amx", "avx2")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    threads: Annotated[int, typer.Option(min=1, help="Threads of all.")] = machine.cores(),
    tokens: Annotated[list[int], typer.Option(min=1, help="Tokens of a pass; may be repeated.")] = [1, 128, 512, 1024],  # noqa: B006
    repetitions: Annotated[int, typer.Option(min=1, help="Passes of each, taking turns.")] = 15,
    experts: Annotated[int, typer.Option(min=TOP_K, help="Experts of the layer; the 35B has 256.")] = 256,
    kt_python: Annotated[Path | None, typer.Option(help="Interpreter that has kt-kernel.")] = None,
) -> None:
    """Time passes over 1 and more tokens by every instruction set, activation and by kt-kernel, all in turn."""
    layer, rng = _layer(experts), np.random.default_rng(0)
    _native.set_threads(threads)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        shape = [str(size) for size in (experts, TOP_K, HIDDEN, INNER, threads, max(tokens))]
        for variant in KT_VARIANTS if kt_python else ():
            script = str(Path(__file__).parent / "experts_kt.py")
            worker = Worker(f"kt-kernel {variant}", [str(kt_python), script, *shape, variant], folder / variant)
            stack.callback(worker.close)
            worker.ask_alone("tokens", 1)
            workers[worker.name] = worker
        ways = [(isa, bf16) for isa in _native.isas() if isa != "scalar" for bf16 in (False, True)]
        ways = [way for way in ways if not way[1] or _native.bf16_dot_peak(1e-3, way[0])]
        ceiling = machine.read_ceiling(1.0, threads)
        print(f"{threads} threads, {repetitions} passes, medians; read ceiling {ceiling / 1e9:.1f} GB/s")
        for count in tokens:
            found: dict[str, list[float]] = {}
            for _ in range(repetitions):
                for isa, bf16 in ways:
                    for _ in range(PASSES):
                        seconds = _seconds(layer, _routing(rng, experts, count), rng, isa, bf16)
                    found.setdefault(f"mosaic {isa} {'bf16' if bf16 else 'f32'}", []).append(seconds)
                for name, worker in workers.items():
                    found.setdefault(name, []).append(worker.ask_alone("tokens", count)["seconds"])
            nbytes = NBYTES * len(np.unique(_routing(np.random.default_rng(1), experts, count)))
            for name, times in found.items():
                seconds = median(times)
                speed, work = nbytes / seconds, 2 * NBYTES * TOP_K * count / seconds
                print(f"{count:>5} tokens  {name:<20}{seconds * 1e3:9.3f} ms  {speed / 1e9:6.1f} GB/s "
                      f"{speed / ceiling:4.0%}  {work / 1e9:7.1f} GFLOP/s")  # fmt: skip


def _layer(experts: int) -> list[_native.Expert]:
    """Random codes of moderate size in huge pages."""
    memory, rng = aligned(NBYTES * experts), np.random.default_rng(0)
    memory[:] = rng.integers(40, 72, memory.size, np.uint8) | rng.integers(0, 2, memory.size, np.uint8) << 7

    def matrix(place: int, rows: int, columns: int) -> _native.Matrix:
        codes = memory[place : place + rows * columns].reshape(rows, columns)
        return _native.Matrix(codes, np.full((rows // BLOCK, columns // BLOCK), SCALE, np.uint16))

    part = NBYTES // 3
    return [
        _native.Expert(matrix(start, INNER, HIDDEN), matrix(start + part, INNER, HIDDEN),
                       matrix(start + 2 * part, HIDDEN, INNER))
        for start in range(0, memory.size, NBYTES)
    ]  # fmt: skip


def _routing(rng: np.random.Generator, experts: int, tokens: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :TOP_K].astype(np.int32)


def _seconds(
    experts: list[_native.Expert], routing: np.ndarray, rng: np.random.Generator, isa: str, bf16: bool
) -> float:
    used, slots = np.unique(routing, return_inverse=True)
    chosen = [experts[number] for number in used.tolist()]
    x = rng.standard_normal((len(routing), HIDDEN), np.float32)
    y, shares = np.empty_like(x), np.full(routing.shape, 1 / TOP_K, np.float32)
    places = slots.astype(np.int32).reshape(routing.shape)
    start = time.perf_counter()
    _native.mix_experts(chosen, places, shares, x, y, bf16, isa)
    return time.perf_counter() - start


if __name__ == "__main__":
    run_program(app)
