"""mosaic-run: a model directory in, text out. Heavy imports wait until the arguments are known to be sound."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic.format.errors import InputError, run_program
from mosaic.recipes import demo_model
from mosaic.runtime.answer import Answer, Figures
from mosaic.runtime.sizes import parse_size

if TYPE_CHECKING:
    from mosaic.runtime.chat import ChatTemplate

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    out: Annotated[str | None, typer.Argument(metavar="OUT", help="Model directory; left out with --demo.")] = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to say; - reads standard input.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Use the embedded demo model instead of OUT.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain text, without chat template.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of the answer; default: no limit."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest, up to this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many tokens; 0: from all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's, if memory allows.")
    ] = None,
    kv: Annotated[str, typer.Option(help="How keys and values are kept: f32, bf16 or e4m3.")] = "bf16",
    ops: Annotated[str, typer.Option(help="Who computes: cpu, or reference (slow, float64).")] = "cpu",
    activations: Annotated[
        str, typer.Option(help="What E4M3 weights are multiplied with: f32, or bf16 where the CPU can.")
    ] = "f32",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, envvar="MOSAIC_THREADS", help="Threads to use; default: all cores."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time went, by operation.")] = False,
    stats: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="Figures on standard error: text, json (one object, last line), or live."),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory to take, as 8GiB; default: what is free, but for some head-room."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only tell where the memory goes and what to expect.")] = False,
    warm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Routing profile: experts to read at the start.")
    ] = None,
    record_routing: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write (or continue) a trace of the router's choices.")
    ] = None,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Read experts that the next layer will probably choose.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare the checksum of every expert that is read.")] = False,
) -> None:
    """Answer a prompt with the model in OUT. Without a prompt, on a terminal, it is a chat.

    Defaults for sampling come from the model's generation_config.json. A model that fits the memory is mapped and used
    as it lies. Of one that does not, as many experts as --ram has room for are in memory, and the others are read from
    the disk when they are chosen: slower, but the same words. Checksums are for mosaic-verify, or --check. The demo is
    converted once, into XDG_CACHE_HOME (~/.cache)/mosaic.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    if demo:
        if prompt is not None:
            raise _usage("OUT and --demo together", "mosaic-run --demo PROMPT")
        out, prompt = None, out
    elif out is None:
        raise _usage("neither OUT nor --demo", "mosaic-run OUT PROMPT, or mosaic-run --demo PROMPT")
    if stats not in (None, *Figures):
        raise InputError("no such --stats", found=stats, expected=", ".join(Figures), remedy="choose one of them")
    budget = None if ram is None else parse_size("--ram", ram)
    if plan:
        show_plan(demo_model() if out is None else Path(out), kv, context, budget, threads, stats == Figures.JSON)
        return
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if not interactive and prompt in (None, "-"):
        prompt = sys.stdin.read() if sys.stdin else ""
    if not interactive and not str(prompt).strip():
        raise InputError("the prompt is empty", found=repr(prompt), expected="some text", remedy="write a prompt")

    from dataclasses import replace

    from mosaic.runtime.chat import ChatTemplate
    from mosaic.runtime.engine import load_engine
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import LoadOptions
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option

    kv_format = option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
    profiled = None
    if profile:
        from mosaic.runtime.ops.profiled import ProfiledOps

        chosen = profiled = ProfiledOps(chosen)
    folder = demo_model() if out is None else Path(out)  # converts it, which takes a while: options are fine by now
    wishes = LoadOptions(check, prefetch, warm, record_routing)
    engine = load_engine(folder, chosen, kv=kv_format, context=context, ram=budget, options=wishes)
    sampling = engine.defaults
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    if top_p is not None:
        sampling = replace(sampling, top_p=top_p)
    if top_k is not None:
        sampling = replace(sampling, top_k=top_k)
    answer = Answer(engine, sampling, seed, max_tokens, stats, profiled)
    if interactive:
        chat(answer, None if raw else ChatTemplate(folder))
        return
    assert prompt is not None
    answer(prompt if raw else ChatTemplate(folder).render([{"role": "user", "content": prompt}]))
    print()


def chat(answer: Answer, template: "ChatTemplate | None") -> None:
    """A conversation on a terminal, until end of input (Ctrl-D)."""
    import readline  # noqa: F401 - line editing for input()

    print("Ctrl-D ends the chat, Ctrl-C an answer.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        try:
            reply = answer(said if template is None else template.render(messages))
            messages.append({"role": "assistant", "content": reply})
        except KeyboardInterrupt:
            messages.pop()
        except InputError as error:  # a full context, say: the chat itself can go on
            messages.pop()
            print(f"error: {error}", file=sys.stderr)
        print()


def show_plan(folder: Path, kv: str, context: int | None, ram: int | None, threads: int | None, as_json: bool) -> None:
    """Where the memory would go, and the speed to expect."""
    from mosaic.runtime import chat, engine  # noqa: F401 - as much of the program as a run has in memory
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import Loading
    from mosaic.runtime.machine import cores
    from mosaic.runtime.ops.choice import OpsName, make_ops, option
    from mosaic.runtime.plan_text import expectations, plan_dict, plan_lines
    from mosaic.runtime.speeds import speeds
    from mosaic.runtime.tokenizer import Tokenizer

    loading = Loading(folder, option("kv", kv, KVFormat), context=context, ram=ram)
    needed = Tokenizer(folder), make_ops(OpsName.CPU, threads=threads)  # they take memory that is planned for
    found = speeds(*loading.spans, threads or cores())
    dense = sum(info.nbytes for info in loading.weights.dense().values())
    expected = expectations(loading.plan, loading.places, len(loading.weights.spec.layers), dense, found)
    if as_json:
        print(json.dumps(plan_dict(loading.plan, expected, found)))
    else:
        print(*plan_lines(loading.plan, expected, found), sep="\n")
    del needed


def _usage(found: str, expected: str) -> InputError:
    return InputError("what to run is not clear", found=found, expected=expected, remedy="see mosaic-run --help")


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
