"""mosaic-bench: how fast a model directory is on this machine. Heavy imports wait until the arguments are sound."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError, run_program
from mosaic.runtime import options

if TYPE_CHECKING:
    from mosaic.runtime.bench import Measurement

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

PROMPT, GENERATE = 512, 1 << 7  # tokens, as llama-bench has them; not the block of the format
CEILING_SECONDS = 1.0
REPLAYED = ("replay", "slots", "save_profile", "as_json")  # what --replay uses
SIMULATED = ("out", "demo", "simulate", "trace", "vram", "ram", "as_json")  # what --simulate uses
KNOWN = "list"  # instead of a profile: the names of those there are

Figures = dict[str, float | int | str | None]


@app.command()
def command(
    invocation: typer.Context,
    out: options.Out = None,
    demo: options.Demo = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a model: replay a trace of mosaic-run.")
    ] = None,
    slots: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="With --replay: experts that fit the memory; may be repeated."),
    ] = None,
    save_profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --replay: add the trace's uses to a profile for mosaic-run --warm."),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Measure nothing: foresee another machine, by the name or file of a profile; or list.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --simulate: a trace of mosaic-run; else a synthetic one."),
    ] = None,
    vram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --simulate: VRAM for experts; default: 3.2GiB.")
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(min=1, metavar="TOKENS", help=f"Length of a prompt, {PROMPT}; may be repeated.")
    ] = None,
    generate: Annotated[
        list[int] | None, typer.Option(min=1, metavar="TOKENS", help=f"Tokens made, {GENERATE}; may be repeated.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="How often every size is measured.")] = 3,
    threads: options.Threads = None,
    ops: options.OpsChoice = "cpu",
    activations: options.ActivationsChoice = "f32",
    ram: options.Ram = None,
    kv: options.KV = "bf16",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as one JSON object, in the last line.")
    ] = False,
    version: options.Version = False,
) -> None:
    """Measure how fast OUT reads prompts (pp) and generates tokens (tg), in tokens per second.

    Prompts are random tokens, read from an empty state in the chunks of mosaic-run. Generation begins after 16 tokens,
    and is fed random tokens one by one; nothing is sampled. Before the first repetition the longest prompt is read
    once, uncounted. GB/s are the weights read to generate, beside the speed at which this machine can read at all.

    --replay measures no time: it shows how many of a trace's experts a cache of so many slots would have held, by our
    policy, LRU, LFU and the best one in hindsight (Belady), and the bytes to be read for a token.

    --simulate measures nothing either: it foresees what a machine that is not here makes of OUT, or, without OUT, of
    Qwen3.6-35B-A3B. A trace goes through the real tracker, promotion policy and slots of VRAM and RAM; a profile of
    the machine, published and assumed figures, says what each step takes. It shows tokens per second, hits, and what
    crosses PCIe if the CPU computes the experts that VRAM lacks, beside what would if all of them were copied.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    _need("--replay", replay, {"--slots": slots, "--save-profile": save_profile})
    _need("--simulate", simulate, {"--trace": trace, "--vram": vram})
    if simulate is not None:
        used = ("simulate",) if simulate == KNOWN else SIMULATED
        options.refuse_beside(invocation, "--simulate", lambda name: name not in used)
        if out and demo:
            options.one_model(out, demo, "mosaic-bench")
        _simulate(simulate, trace, out, demo, options.size("--vram", vram), options.size("--ram", ram), as_json)
        return
    given = {"OUT": out is not None, "--demo": demo, "--replay": replay is not None}
    if sum(given.values()) != 1:
        raise InputError(
            "what to measure is not clear",
            found=" and ".join(name for name, present in given.items() if present) or "none of them",
            expected="one of OUT, --demo, --replay and --simulate",
            remedy="see mosaic-bench --help",
        )
    if replay:
        options.refuse_beside(invocation, "--replay", lambda name: name not in REPLAYED)
        from mosaic.runtime.bench_replay import add_to_profile, print_replay

        print_replay(replay, slots or [], as_json)
        if save_profile:
            add_to_profile(replay, save_profile)
        return

    from mosaic.runtime import machine
    from mosaic.runtime.bench import SHORT_PROMPT, run_tests
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import Loading, LoadOptions
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
    from mosaic.runtime.ops.cpu import isa

    count = threads or machine.cores()
    kv_format = option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), count)
    folder = options.model_folder(out)
    prompts, lengths = prompt or [PROMPT], generate or [GENERATE]
    budget = options.size("--ram", ram)
    needed = max(*prompts, SHORT_PROMPT + max(lengths))  # run_tests tells what is too much for the model
    context = min(needed, read_catalog(folder).spec.max_position_embeddings)
    loading = Loading(folder, kv_format, context=context, ram=budget)
    loaded = loading.load(chosen, LoadOptions())
    model = loaded.model

    tests = run_tests(model, prompts, lengths, repetitions, _note)
    traffic = loaded.traffic()
    peak = machine.peak_rss()  # before the ceiling takes memory of its own
    _note("measuring the read ceiling")
    ceiling = machine.read_ceiling(CEILING_SECONDS, count) / 1e9
    prefill, decode = (next(test for test in tests if test.kind == kind) for kind in ("prefill", "decode"))
    read = _gb_s(decode, model.nbytes_per_token)
    figures: Figures = {
        "model": str(folder),
        "prompt": prefill.tokens,
        "generate": decode.tokens,
        "repetitions": repetitions,
        "prefill_tok_s": prefill.tok_s,
        "decode_tok_s": decode.tok_s,
        "weight_bytes_per_token": model.nbytes_per_token,
        "decode_gb_s": read,
        "read_ceiling_gb_s": ceiling,
        "read_share": read / ceiling,
        "threads": count,
        "isa": isa(),
        "ops": ops,
        "activations": activations if ops == OpsName.CPU else None,
        "kv": kv,
        "peak_rss_bytes": peak,
        "ram_bytes": loading.plan.budget,
        "expert_slots": loading.plan.slots,
        **traffic.as_dict(),
    }
    print(table(tests, figures))
    if as_json:
        print(json.dumps({**figures, "tests": [test.as_dict() for test in tests]}))


def _need(mode: str, given: object, values: Mapping[str, object]) -> None:
    """InputError for options, with what was given for them, that only mean something with `mode`."""
    for option, value in values.items():
        if value and given is None:
            raise InputError(f"{option} needs {mode}", found=f"no {mode}", remedy="see mosaic-bench --help")


def _simulate(
    machine: str, trace: Path | None, out: Path | None, demo: bool, vram: int | None, ram: int | None, as_json: bool
) -> None:
    from mosaic.runtime.bench_simulate import print_known, print_simulation

    if machine == KNOWN:
        print_known()
    else:
        folder = options.model_folder(out) if out or demo else None
        print_simulation(machine, trace, folder, vram, ram, as_json)


def table(tests: "list[Measurement]", figures: Figures) -> str:
    """What a person reads."""
    weight_bytes, ceiling = figures["weight_bytes_per_token"], figures["read_ceiling_gb_s"]
    assert isinstance(weight_bytes, int)
    assert isinstance(ceiling, float)
    with_activations = f", {figures['activations']} activations" if figures["activations"] else ""
    lines = [
        f"{figures['model']}: {figures['ops']}{with_activations}, kv {figures['kv']}, "
        f"{figures['threads']} threads, {figures['isa']}",
        f"{'test':<10}{'tok/s':>10}{'min':>10}{'max':>10}{'GB/s':>8}{'of ceiling':>12}",
    ]
    for test in tests:
        line = f"{test.name:<10}{test.tok_s:>10.2f}{min(test.values):>10.2f}{max(test.values):>10.2f}"
        if test.kind == "decode":
            speed = _gb_s(test, weight_bytes)
            line += f"{speed:>8.2f}{speed / ceiling:>12.0%}"
        lines.append(line)
    lines.append(
        f"medians of {figures['repetitions']}; {weight_bytes:,} weight bytes per token; "
        f"read ceiling {ceiling:.2f} GB/s; peak memory {figures['peak_rss_bytes']:,} bytes"
    )
    if figures["expert_slots"] is not None:
        lines.append(
            f"{figures['expert_slots']:,} experts in memory; found there, prompts and warm-up included: "
            f"{figures['expert_hit_rate']:.1%}; the others read at {figures['disk_gb_s']:.2f} GB/s"
        )
    return "\n".join(lines)


def _gb_s(test: "Measurement", nbytes: int) -> float:
    """GB/s of weights, of which a token needs `nbytes`."""
    return test.tok_s * nbytes / 1e9


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
