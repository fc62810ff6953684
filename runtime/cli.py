"""mosaic-run: a model directory in, text out. Heavy imports wait until the arguments are known to be sound."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic.format.errors import InputError, run_program
from mosaic.recipes import demo_model

if TYPE_CHECKING:
    from mosaic.runtime.chat import ChatTemplate
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.ops.profiled import ProfiledOps
    from mosaic.runtime.sampler import Sampling

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
    context: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's.")] = None,
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
    stats: Annotated[bool, typer.Option("--stats", help="Print figures on standard error.")] = False,
    stats_json: Annotated[
        bool, typer.Option("--stats-json", help="The same as one JSON object, in the last line.")
    ] = False,
) -> None:
    """Answer a prompt with the model in OUT. Without a prompt, on a terminal, it is a chat.

    Defaults for sampling come from the model's generation_config.json. Weights are mapped and used as they lie; their
    checksums are for mosaic-verify. The demo is converted once, into XDG_CACHE_HOME (~/.cache)/mosaic.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    if demo:
        if prompt is not None:
            raise _usage("OUT and --demo together", "mosaic-run --demo PROMPT")
        out, prompt = None, out
    elif out is None:
        raise _usage("neither OUT nor --demo", "mosaic-run OUT PROMPT, or mosaic-run --demo PROMPT")
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if not interactive and prompt in (None, "-"):
        prompt = sys.stdin.read() if sys.stdin else ""
    if not interactive and not str(prompt).strip():
        raise InputError("the prompt is empty", found=repr(prompt), expected="some text", remedy="write a prompt")

    from dataclasses import replace

    from mosaic.runtime.chat import ChatTemplate
    from mosaic.runtime.engine import load_engine
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
    from mosaic.runtime.state import KVFormat

    kv_format = option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
    profiled = None
    if profile:
        from mosaic.runtime.ops.profiled import ProfiledOps

        chosen = profiled = ProfiledOps(chosen)
    folder = demo_model() if out is None else Path(out)  # converts it, which takes a while: options are fine by now
    engine = load_engine(folder, chosen, kv=kv_format, context=context)
    sampling = engine.defaults
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    if top_p is not None:
        sampling = replace(sampling, top_p=top_p)
    if top_k is not None:
        sampling = replace(sampling, top_k=top_k)
    shown = "json" if stats_json else "text" if stats else "none"
    answer = Answer(engine, sampling, seed, max_tokens, shown, profiled)
    if interactive:
        chat(answer, None if raw else ChatTemplate(folder))
        return
    assert prompt is not None
    answer(prompt if raw else ChatTemplate(folder).render([{"role": "user", "content": prompt}]))
    print()


class Answer:
    """Streams the answer to a rendered prompt to standard output."""

    def __init__(
        self,
        engine: "Engine",
        sampling: "Sampling",
        seed: int | None,
        max_tokens: int | None,
        stats: str,
        profiled: "ProfiledOps | None",
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._max_tokens = max_tokens
        self._stats = stats
        self._profiled = profiled

    def __call__(self, text: str) -> str:
        """The answer; what was printed is what is returned. Ctrl-C in a chat ends the answer, not the chat."""
        from mosaic.runtime.engine import Stats

        stats = Stats()
        parts: list[str] = []
        tokenizer = self._engine.tokenizer
        stream = tokenizer.stream()
        tokens = self._engine.generate(tokenizer.encode(text), self._sampling, self._seed, self._max_tokens, stats)
        profile: list[str] = []
        if self._profiled:
            self._profiled.reset()
        try:
            for token in tokens:
                if self._profiled and not parts:
                    profile += ["prompt", *self._profiled.table(self._profiled.elapsed), ""]
                    self._profiled.reset()
                parts.append(stream.push(token))
                print(parts[-1], end="", flush=True)
        finally:
            parts.append(stream.finish())
            print(parts[-1], end="", flush=True)
        if stats.stop_reason == "context full":
            print(f"\nnote: the context of {self._engine.context:,} tokens is full", end="", file=sys.stderr)
        if self._profiled:
            from mosaic.runtime.machine import read_ceiling
            from mosaic.runtime.ops.cpu import threads

            elapsed = self._profiled.elapsed
            if not profile:  # no token came
                profile += ["prompt", *self._profiled.table(elapsed), ""]
                self._profiled.reset()
                elapsed = self._profiled.elapsed
            table = self._profiled.table(elapsed, read_ceiling(0.5, threads()))
            profile += [f"answer, {stats.decoded_tokens} tokens", *table]
            print("", *profile, sep="\n", file=sys.stderr)
        self._report(stats.as_dict())
        return "".join(parts)

    def _report(self, figures: dict[str, float | int | str]) -> None:
        if self._stats == "json":
            print(f"\n{json.dumps(figures)}", file=sys.stderr)
        elif self._stats == "text":
            print(
                f"\nprompt {figures['prompt_tokens']} tokens ({figures['reused_tokens']} reused), "
                f"{figures['prefill_tok_s']} tok/s; "
                f"answer {figures['generated_tokens']} tokens, {figures['decode_tok_s']} tok/s, "
                f"{figures['weight_bytes_per_token']:,} weight bytes per token, {figures['decode_gb_s']} GB/s; "
                f"ended by {figures['stop_reason']}",
                file=sys.stderr,
            )


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


def _usage(found: str, expected: str) -> InputError:
    return InputError("what to run is not clear", found=found, expected=expected, remedy="see mosaic-run --help")


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
