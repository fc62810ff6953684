"""mosaic-bench: how fast a model directory is on this machine. Heavy imports wait until the arguments are sound."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from mosaic.format.errors import InputError
from mosaic.format.program import Version, run_program
from mosaic.runtime import options

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

PROMPT, GENERATE = 512, 1 << 7  # tokens, as llama-bench has them; not the block of the format
REPLAYED = ("replay", "slots", "save_profile", "as_json")  # what --replay uses
SIMULATED = ("out", "demo", "simulate", "trace", "vram", "ram", "as_json")  # what --simulate uses
KNOWN = "list"  # instead of a profile: the names of those there are


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
    device: options.Device = "auto",
    vram: options.Vram = None,
    gpu_layers: options.GpuLayers = None,
    prompt: Annotated[
        list[int] | None, typer.Option(min=1, metavar="TOKENS", help=f"Length of a prompt, {PROMPT}; may be repeated.")
    ] = None,
    generate: Annotated[
        list[int] | None, typer.Option(min=1, metavar="TOKENS", help=f"Tokens made, {GENERATE}; may be repeated.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="How often every size is measured.")] = 3,
    threads: options.TunedThreads = None,
    ops: options.OpsChoice = "cpu",
    activations: options.ActivationsChoice = "f32",
    ram: options.Ram = None,
    kv: options.KV = "bf16",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as one JSON object, in the last line.")
    ] = False,
    version: Version = False,
) -> None:
    """Measure how fast OUT reads prompts (pp) and generates tokens (tg), in tokens per second.

    Prompts are random tokens, read from an empty state in the chunks of mosaic-run. Generation begins after 16 tokens,
    and is fed random tokens one by one; nothing is sampled. Before the first repetition the longest prompt is read and
    a few tokens are generated once, uncounted. GB/s are the weights read to generate, beside the speed at which this
    machine can read at all. With a GPU it shows what lay there, and for each token how many experts were found there,
    and how many bytes of experts were copied to it.

    --replay measures no time: it shows how many of a trace's experts a cache of so many slots would have held, by our
    policy, LRU, LFU and the best one in hindsight (Belady), and the bytes to be read for a token.

    --simulate measures nothing either: it foresees what a machine that is not here makes of OUT, or, without OUT, of
    Qwen3.6-35B-A3B. A trace goes through the real tracker, promotion policy and slots of VRAM and RAM; a profile of
    the machine, published and assumed figures, says what each step takes. It shows tokens per second, hits, and what
    crosses PCIe if the CPU computes the experts that VRAM lacks, beside what would if all of them were copied. --vram
    is then of that machine, 3.2GiB by default, as is --ram.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    _need("--replay", replay, {"--slots": slots, "--save-profile": save_profile})
    _need("--simulate", simulate, {"--trace": trace})
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

    slots_nbytes, budget = options.vram_size(device, vram, gpu_layers), options.size("--ram", ram)
    from mosaic.runtime.bench_measure import print_measurement
    from mosaic.runtime.wishes import VramWishes

    print_measurement(
        out, prompts=prompt or [PROMPT], generate=generate or [GENERATE], repetitions=repetitions, threads=threads,
        ops=ops, activations=activations, ram=budget, kv=kv, device=device,
        vram=VramWishes(slots_nbytes, gpu_layers), as_json=as_json,
    )  # fmt: skip


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


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
