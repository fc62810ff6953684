"""Mosaic beside other engines on models of the 35B's shape, and beside what the machine can do: `just bench`.

Models of two sizes tell what a layer costs and what the rest does, and so what the whole 35B would take, which this
machine may have no room for. The engines are processes that take turns; every repetition measures all of them and the
machine's ceilings, so that a machine that is slow for a while is slow for all. It should be idle all the same: OpenMP's
barriers, which llama.cpp waits in, cost whole time slices when anyone else takes a core. kt-kernel is not measured.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.checks import check_room, check_sizes
from bench.convert import evict
from bench.engine_table import LAYERS, Series, table
from bench.engine_worker import Worker
from bench.shape import Json, fused, model_config
from bench.write_model import model_bytes, write_model
from mosaic.format.errors import InputError
from mosaic.format.program import run_program
from mosaic.runtime import machine
from mosaic.runtime.bench import SHORT_PROMPT, random_tokens

FOLDER = Path(__file__).parent
PERIOD = 4  # layers after which their kinds repeat
CEILING_SECONDS = 0.5

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Engine(StrEnum):
    """What can be measured."""

    MOSAIC = "mosaic"
    MOSAIC_BF16 = "mosaic-bf16"  # activations
    LLAMA = "llama.cpp"


@app.command()
def command(
    folder: Annotated[Path | None, typer.Argument(help="Where to work; a disk with some 20 GB free.")] = None,
    layers: Annotated[list[int], typer.Option(min=1, help="Sizes of the model; may be repeated.")] = [4, 8],  # noqa: B006
    vocab: Annotated[int, typer.Option(help="Rows of embedding and head; the true number is 248320.")] = 248320,
    engine: Annotated[list[Engine], typer.Option(help="What to measure; may be repeated.")] = list(Engine),  # noqa: B006
    llama_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has llama-cpp-python; without it llama.cpp is left out.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = machine.cores(),
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    generate: Annotated[int, typer.Option(min=1, help="Tokens decoded one by one.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="How often all of them take their turn.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object, too.")] = False,
) -> None:
    """Measure decode and prefill of every engine at every size. Weights are random; models are deleted afterwards."""
    engines = [chosen for chosen in dict.fromkeys(engine) if chosen is not Engine.LLAMA or _has_llama(llama_python)]
    for count in layers:
        check_sizes(count, vocab)
        if count == 1 and Engine.LLAMA in engines:
            expected = "2 or more: llama.cpp aborts on this family without a linear attention layer"
            raise InputError("--layers is not usable with llama.cpp", found=1, expected=expected, remedy="--layers 2")
    if any(count % PERIOD for count in layers):
        _note(f"the 35B has {PERIOD - 1} linear attention layers to a full one; sizes that are no multiple of {PERIOD}"
              " have other mixes, and their extrapolation means little")  # fmt: skip
    series = {(name, test): Series(name, test) for name in engines for test in ("decode", "prefill")}
    ceilings: dict[str, list[float]] = {}
    work = Path(tempfile.mkdtemp(prefix="bench-engine.", dir=folder))
    try:
        for count in sorted(set(layers)):
            config = model_config(count, vocab)
            commands = _write(work / "model", work / "model.gguf", config, engines, llama_python, threads,
                              max(prompt, SHORT_PROMPT + generate))  # fmt: skip
            _measure(commands, work, count, config, prompt, generate, repetitions, threads, series, ceilings)
            shutil.rmtree(work / "model", ignore_errors=True)
            (work / "model.gguf").unlink(missing_ok=True)
    finally:
        shutil.rmtree(work)
    medians = {name: median(values) / 1e9 for name, values in ceilings.items()}
    print(
        f"{threads} threads, {repetitions} repetitions, vocabulary {vocab}; prefill of {prompt} tokens, decode of "
        f"{generate} after {SHORT_PROMPT}; medians (least, most); GB/s of weights in decode at the largest size; "
        f"{LAYERS} layers are extrapolated"
    )
    print(table(list(series.values()), medians["read"]))
    print(f"read ceiling {medians['read']:.2f} GB/s, multiply-adds {medians['multiply_add']:.1f} GFLOP/s in float32, "
          f"{medians['bf16_dot']:.1f} in bfloat16 dot products")  # fmt: skip
    if as_json:
        found = [entry.as_dict(medians["read"]) for entry in series.values()]
        print(json.dumps({"threads": threads, "vocab": vocab, "ceilings": ceilings, "series": found}))


def _has_llama(python: Path | None) -> bool:
    """Whether llama.cpp can be measured; a note if not."""
    if python is None:
        _note("llama.cpp is left out: no --llama-python")
        return False
    try:
        found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True)
    except OSError as error:
        raise InputError("--llama-python cannot be run", file=python, found=error, remedy="name another") from error
    if found.returncode:
        _note(f"llama.cpp is left out: {(found.stderr.strip().splitlines() or ['no llama_cpp'])[-1]}")
    return found.returncode == 0


def _write(
    model: Path, gguf: Path, config: Json, engines: list[Engine], python: Path | None, threads: int, tokens: int
) -> dict[str, list[str]]:
    """Write what the engines need; how each of them is started. `tokens`: the most it has to take at once."""
    commands: dict[str, list[str]] = {}
    own = [sys.executable, str(FOLDER / "engine_mosaic.py")]
    text = config["text_config"]
    _note(f"{text['num_hidden_layers']} layers: writing")
    if Engine.MOSAIC in engines or Engine.MOSAIC_BF16 in engines:
        check_room(model, model_bytes(config))
        write_model(model, config, seed=0, quiet=True)
        evict(model)  # to be mapped in huge pages, as what mosaic-convert has written
        for name, activations in ((Engine.MOSAIC, "f32"), (Engine.MOSAIC_BF16, "bf16")):
            if name in engines:
                commands[name] = [*own, str(model), activations, str(threads)]
    if Engine.LLAMA in engines:
        from bench.write_gguf import gguf_bytes, write_gguf

        check_room(gguf, gguf_bytes(config))
        write_gguf(gguf, config, seed=0, quiet=True)
        ids = [str(token) for token in random_tokens(text["vocab_size"], tokens)]
        commands[Engine.LLAMA] = [str(python), str(FOLDER / "engine_llama.py"), str(gguf), str(threads), *ids]
    return commands


def _measure(
    commands: dict[str, list[str]],
    work: Path,
    layers: int,
    config: Json,
    prompt: int,
    generate: int,
    repetitions: int,
    threads: int,
    series: dict[tuple[str, str], Series],
    ceilings: dict[str, list[float]],
) -> None:
    """All engines in turn on one size; a first round of each is not counted."""
    tests = {"prefill": prompt, "decode": generate}
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> Worker:
            worker = Worker(name, command, work / f"{name}.log")
            stack.callback(worker.close)
            return worker

        workers = []
        for name, command in commands.items():
            _note(f"{layers} layers: {name} is loaded and warmed up")
            workers.append(start(name, command))
            for test, count in tests.items():
                workers[-1].ask(test, count)
            nbytes = q8_bytes(config) if name == Engine.LLAMA else workers[-1].ask("bytes", 0)["per_token"]
            series[name, "decode"].nbytes[layers] = nbytes
        own = start("ceilings", [sys.executable, str(FOLDER / "engine_mosaic.py"), str(threads)])
        for repetition in range(repetitions):
            _note(f"{layers} layers: repetition {repetition + 1} of {repetitions}")
            for worker in workers:
                for test, count in tests.items():
                    series[worker.name, test].add(layers, worker.ask(test, count)["seconds"] * 1e3 / count)
            for name, speed in own.ask("ceilings", CEILING_SECONDS).items():
                ceilings.setdefault(name, []).append(speed)


def q8_bytes(config: Json) -> float:
    """Bytes of the GGUF that are read to decode one token."""
    from bench.write_gguf import F32, Q8_BLOCK

    text, total = config["text_config"], 0.0
    for weight in fused(config):
        nbytes = 4 * weight.count if weight.key.endswith(F32) else weight.count / Q8_BLOCK * (2 + Q8_BLOCK)
        if ".experts." in weight.key:
            nbytes *= text["num_experts_per_tok"] / text["num_experts"]
        total += 0 if weight.key == "embedding" else nbytes
    return total


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(app)
