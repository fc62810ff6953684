"""Mosaic within budgets of memory, beside the disk's ceiling and llama.cpp's mmap under the same cap: just bench-tiers.

Every run is a process of its own in a control group whose limit is its budget, page cache included (needs root; without
it the budget is only kept by Mosaic itself, and llama.cpp is left out). Routing is that of a trace: uniform, or with
published statistics (routing.py); llama.cpp has its random router's, which is uniform. Disks are moody: the ceiling is
measured before every run, and a run is compared with its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.checks import check_room, check_sizes
from bench.convert import evict
from bench.disk import read_bandwidth
from bench.routing import Kind
from bench.shape import Json, model_config
from bench.write_model import model_bytes, write_model
from mosaic.format.errors import InputError
from mosaic.format.program import run_program
from mosaic.runtime import machine
from mosaic.runtime.bench import SHORT_PROMPT, random_tokens
from mosaic.runtime.sizes import format_size, parse_size
from support.cgroup import limited

FOLDER = Path(__file__).parent
DISK_DEPTHS = (1, 2, 4, 8, 16)  # the best of these is the ceiling
DISK_SECONDS = 0.5
SLACK = 1.05  # of its budget that a run is allowed
LLAMA_TOKENS = 16  # it decodes less than one a second

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path | None, typer.Argument(help="Where to work; a disk with room for the model.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the model; the true number is 40.")] = 8,
    ram: Annotated[list[str], typer.Option(metavar="SIZE", help="Budgets; may be repeated.")] = ["3GB", "5GB"],  # noqa: B006
    llama_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has llama-cpp-python; without it llama.cpp is left out.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = machine.cores(),
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of the prompt.")] = 1024,
    generate: Annotated[int, typer.Option(min=1, help="Tokens decoded one by one.")] = 48,
    repetitions: Annotated[int, typer.Option(min=1, help="How often all of them take their turn.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object, too.")] = False,
) -> None:
    """Decode and prefill at every budget, with uniform and with skewed routing. The model is deleted afterwards."""
    check_sizes(layers, 248320)
    if llama_python and os.getuid() != 0:
        _note("llama.cpp is left out: only root can cap what it takes")
        llama_python = None
    budgets = {text: parse_size("--ram", text) for text in ram}
    config = model_config(layers, 248320)
    with tempfile.TemporaryDirectory(prefix="bench-tiers.", dir=folder) as work:
        print(
            *_lines(Path(work), config, budgets, llama_python, threads, prompt, generate, repetitions, as_json),
            sep="\n",
        )


def _lines(
    work: Path,
    config: Json,
    budgets: dict[str, int],
    llama_python: Path | None,
    threads: int,
    prompt: int,
    generate: int,
    repetitions: int,
    as_json: bool,
) -> list[str]:
    model, traces, gguf = work / "model", {}, work / "gguf" / "model.gguf"
    layers = config["text_config"]["num_hidden_layers"]
    check_room(model, model_bytes(config))
    write_model(model, config, seed=0, quiet=True, recipe="e4m3-head")
    for kind in Kind:
        traces[kind] = work / f"{kind}.trace"
        command = [sys.executable, str(FOLDER / "routing.py"), str(traces[kind]), "--layers", str(layers)]
        subprocess.run([*command, "--tokens", str(2 * prompt + 200 + generate), "--kind", kind], check=True)
    if llama_python:
        from bench.write_gguf import gguf_bytes, write_gguf

        gguf.parent.mkdir()
        check_room(gguf, gguf_bytes(config))
        write_gguf(gguf, config, seed=0, quiet=True)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for repetition in range(repetitions):
        for name, budget in budgets.items():
            for kind in Kind:
                _note(f"{repetition + 1} of {repetitions}: {name}, {kind}")
                runs.setdefault((name, kind), []).append(
                    _mosaic(model, budget, threads, layers, prompt, generate, traces[kind])
                )
            if llama_python:
                _note(f"{repetition + 1} of {repetitions}: {name}, llama.cpp")
                found = _llama(llama_python, gguf, budget, threads, config["text_config"]["vocab_size"])
                runs.setdefault((name, "llama.cpp"), []).append(found)
    ceiling = median(run["disk"] for (_, kind), found in runs.items() if kind in set(Kind) for run in found)
    lines = [
        f"{layers} layers, {format_size(sum(file.stat().st_size for file in model.iterdir()))}, {threads} threads, "
        f"medians of {repetitions}; disk {ceiling / 1e9:.2f} GB/s in pieces of 3 MiB (best of depths "
        f"{', '.join(map(str, DISK_DEPTHS))})",
        f"{'budget':<8}{'routing':<12}{'slots':>7}{'hits':>7}{'tok/s':>8}{'MB/token':>10}{'GB/s':>7}{'of disk':>9}"
        f"{'stall':>7}{'prefill':>9}{'peak':>12}{'of plan':>9}",
    ]
    lines += [_row(name, kind, found, generate) for (name, kind), found in runs.items()]
    if as_json:
        flat = {f"{name}, {kind}": found for (name, kind), found in runs.items()}
        lines.append(json.dumps({"layers": layers, "runs": flat}))
    return lines


def _row(name: str, kind: str, found: list[dict[str, Any]], generate: int) -> str:
    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return median(map(value, found))

    speed = middle(lambda one: one["decode_tok_s"])
    if kind == "llama.cpp":
        return f"{name:<8}{kind:<12}{'':>14}{speed:>8.2f}"
    decoded = [one["decode"] for one in found]
    hits = median(one["hits"] / (one["hits"] + one["misses"]) for one in decoded)
    read = median(one["disk_bytes"] for one in decoded)
    rates = [one["disk_bytes"] / one["disk_seconds"] if one["disk_seconds"] else 0.0 for one in decoded]
    share = median(rate / one["disk"] for rate, one in zip(rates, found, strict=True))
    stall = median(one["stall_seconds"] / one["seconds"] for one in decoded)
    slots, peak = found[0]["slots"] or found[0]["experts"], middle(lambda one: one["peak_rss"])
    return (
        f"{name:<8}{kind:<12}{slots:>7}{hits:>7.1%}{speed:>8.2f}{read / generate / 1e6:>10.1f}"
        f"{median(rates) / 1e9:>7.2f}{share:>9.0%}{stall:>7.0%}{middle(lambda one: one['prefill_tok_s']):>9.1f}"
        f"{format_size(peak):>12}{middle(lambda one: one['peak_rss'] / one['plan']):>9.1%}"
    )


def _mosaic(
    model: Path, budget: int, threads: int, layers: int, prompt: int, generate: int, trace: Path
) -> dict[str, Any]:
    evict(model)
    shard = model / "layers-00.safetensors"
    disk = max(read_bandwidth(shard, depth, DISK_SECONDS) for depth in DISK_DEPTHS)
    warm_up = max(16, 640 // layers)
    command = [sys.executable, FOLDER / "tiers_worker.py", model, budget, threads, warm_up, generate, prompt, trace]
    found: dict[str, Any] = json.loads(_run([str(part) for part in command], int(budget * SLACK)))
    return found | {"disk": disk}


def _llama(python: Path, gguf: Path, budget: int, threads: int, vocab: int) -> dict[str, Any]:
    evict(gguf.parent)
    ids = [str(token) for token in random_tokens(vocab, SHORT_PROMPT + LLAMA_TOKENS)]
    command = [str(python), str(FOLDER / "engine_llama.py"), str(gguf), str(threads), *ids]
    request = json.dumps({"decode": LLAMA_TOKENS})
    answer = _run(command, budget, f"{request}\n").splitlines()[-1]
    return {"decode_tok_s": LLAMA_TOKENS / json.loads(answer)["seconds"]}


def _run(command: list[str], limit: int, given: str = "") -> str:
    """What a process prints that may have so much memory."""
    with limited(limit) if os.getuid() == 0 else nullcontext(None) as enter:
        done = subprocess.run(command, input=given, capture_output=True, text=True, preexec_fn=enter)
    if done.returncode:
        raise InputError("a run failed", found=done.stderr.strip()[-2000:] or f"exit code {done.returncode}",
                         remedy="give more memory, or see what it says")  # fmt: skip
    return done.stdout


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
