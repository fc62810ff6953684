"""mosaic-run: a model directory in, text out. Heavy imports wait until the arguments are known to be sound."""

import sys
from pathlib import Path
from typing import Any

import typer

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.format.program import Version, run_program
from mosaic.runtime import options
from mosaic.runtime.terminal import flags
from mosaic.runtime.terminal.conversation import Conversation
from mosaic.runtime.terminal.figures import Form
from mosaic.runtime.terminal.one_shot import answer_once, prompt_text
from mosaic.runtime.terminal.session import Session
from mosaic.runtime.terminal.settings import Settings, named

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

PLANNED = (  # what a plan depends on
    "out", "demo", "kv", "context", "ram", "state_budget", "device", "vram", "gpu_layers", "threads", "stats", "plan"
)  # fmt: skip
TUNED = (  # what tuning depends on; what is given is not tuned
    "out", "demo", "kv", "context", "ram", "state_budget", "device", "vram", "gpu_layers", "activations", "threads",
    "stats", "tune",
)  # fmt: skip
OF_CHATS = ("system", "think", "show_thinking", "session")  # what plain text has no use for


@app.command()
def command(
    invocation: typer.Context,
    out: flags.Out = None,
    prompt: flags.Prompt = None,
    demo: options.Demo = False,
    file: flags.File = None,
    system: flags.System = None,
    raw: flags.Raw = False,
    think: flags.Think = None,
    show_thinking: flags.ShowThinking = None,
    session: flags.SessionFile = None,
    as_json: flags.Json = False,
    max_tokens: flags.MaxTokens = None,
    stop: flags.Stop = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    context: options.Context = None,
    kv: options.KV = "bf16",
    device: options.Device = "auto",
    vram: options.Vram = None,
    gpu_layers: options.GpuLayers = None,
    ops: options.OpsChoice = "cpu",
    activations: options.ActivationsChoice = "f32",
    threads: options.TunedThreads = None,
    profile: flags.Profiled = False,
    stats: flags.Stats = None,
    ram: options.Ram = None,
    state_budget: options.StateBudget = None,
    plan: flags.Plan = False,
    tune: flags.Tune = False,
    warm: options.Warm = None,
    record_routing: options.RecordRouting = None,
    prefetch: options.Prefetch = False,
    check: options.Check = False,
    version: Version = False,
) -> None:
    """Answer a prompt with the model in OUT. Without a prompt, on a terminal, it is a chat.

    Defaults for sampling come from the model's generation_config.json. A model that fits the memory is mapped and used
    as it lies. Of one that does not, as many experts as --ram has room for are in memory, and the others are read from
    the disk when they are chosen: slower, but the same words. Checksums are for mosaic-verify, or --check. The demo is
    converted once, into XDG_CACHE_HOME (~/.cache)/mosaic. What is typed in a chat is kept in XDG_STATE_HOME
    (~/.local/state)/mosaic/history.

    --tune measures this machine with this model, and keeps in XDG_CACHE_HOME/mosaic/tuned.json what was fastest:
    threads and, with a GPU, memory for experts, how often one is used before it is copied there, and from how many
    tokens on and in which pieces a prompt is read there. Later runs of the model use it, but for what their options
    say; an option beside --tune is not tuned. No word of an answer by the CPU depends on it.

    Standard output has the answer and a newline, nothing else, if it is not a terminal.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    if demo:
        if prompt is not None:
            raise _unclear("OUT and --demo together", "mosaic-run --demo PROMPT")
        out, prompt = None, out
    elif out is None:
        raise _unclear("neither OUT nor --demo", "mosaic-run OUT PROMPT, or mosaic-run --demo PROMPT")
    folder = None if out is None else Path(out).expanduser()
    form = options.choice("--stats", stats, Form)
    budget, kept = options.size("--ram", ram), options.size("--state-budget", state_budget)
    slots = options.vram_size(device, vram, gpu_layers)
    if plan or tune:
        mode, used = ("--tune", TUNED) if tune else ("--plan", PLANNED)
        options.refuse_beside(invocation, mode, lambda name: name not in used)
        if prompt is not None or form is Form.LIVE:
            raise _unclear(f"{mode} with a prompt, or --stats live", f"mosaic-run OUT {mode}; there will be no answer")
    if tune:
        from mosaic.runtime.terminal.tuning import tune as find_settings

        find_settings(
            options.model_folder(folder), kv, context=context, ram=budget, state_budget=kept, activations=activations,
            threads=threads, device=device, vram=slots, gpu_layers=gpu_layers, as_json=form is Form.JSON,
        )  # fmt: skip
        return
    if plan:
        from mosaic.runtime.terminal.planning import show_plan

        show_plan(options.model_folder(folder), kv, context=context, ram=budget, state_budget=kept, threads=threads,
                  device=device, vram=slots, gpu_layers=gpu_layers, as_json=form is Form.JSON)  # fmt: skip
        return
    if raw:
        options.refuse_beside(invocation, "--raw", lambda name: name in OF_CHATS)
    settings = _settings(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=logit_bias, seed=seed, thinking=think,
    )  # fmt: skip
    if folder is not None and not folder.exists():
        raise InputError(
            "no such model directory",
            file=folder,
            found="nothing",
            expected="a model directory; a prompt comes after it, in quotes",
            remedy="check the path",
        )
    interactive = prompt is None and file is None and sys.stdin is not None and sys.stdin.isatty()
    if interactive and as_json:
        raise _unclear("--json without a prompt", "mosaic-run OUT PROMPT --json")
    said = None if interactive else prompt_text(prompt, file)
    kept_in = Session(session) if session else None
    if interactive and sys.stderr.isatty():
        print("loading ...", end="\r", file=sys.stderr, flush=True)

    from mosaic.runtime.engine import Engine
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import LoadOptions
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
    from mosaic.runtime.terminal.asking import Asker, Manner
    from mosaic.runtime.terminal.chat import Chat, keyboard
    from mosaic.runtime.terminal.progress import loading_bars
    from mosaic.runtime.text.stops import StopStrings
    from mosaic.runtime.text.template import ChatTemplate

    option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
    StopStrings(stop or ())
    folder = options.model_folder(folder)  # converts the demo, which takes a while: options are fine by now
    catalog = read_catalog(folder)
    if not raw:
        ChatTemplate(folder)
    profiled = None
    if profile:
        from mosaic.runtime.ops.profiled import ProfiledOps
        from mosaic.runtime.tuned import known_tuning, settle_threads

        settle_threads(chosen, threads, known_tuning(catalog, None))
        profiled = ProfiledOps(chosen)
    with loading_bars() as progress:
        engine = Engine.load(
            folder, ram=budget, context=context, kv=kv, state_budget=kept, ops=profiled or ops,
            activations=activations, threads=threads, device=device, vram=slots, gpu_layers=gpu_layers,
            options=LoadOptions(check, prefetch, warm, record_routing), progress=progress,
        )  # fmt: skip
    if form is Form.TEXT and str(engine.tuned):
        print(f"tuned: {engine.tuned}", file=sys.stderr)
    settings.defaults = engine.defaults
    conversation = Conversation(settings, raw=raw)
    if kept_in:
        kept_in.restore(engine, conversation)
        for name, value in settings.changed.items():
            conversation.settings.put(name, value)
    if system is not None:
        conversation.system = system
    asker = Asker(engine, Manner(stop or (), form, show_thinking, quiet=as_json, profiled=profiled))
    if said is None:
        Chat(engine, asker, conversation, kept_in, keyboard(), status=form is None and sys.stderr.isatty()).run()
    else:
        answer_once(engine, asker, conversation, said, kept_in, as_json)


def _settings(**given: Any) -> Settings:
    """What was given, None being nothing. InputError in the words of the command line."""
    settings = Settings()
    for name, value in given.items():
        if value is not None and value != []:
            with named(name, f"--{name.replace('_', '-')}"):
                if name == "logit_bias":
                    settings.set(name, " ".join(value))
                else:
                    settings.put(name, value)
    return settings


def _unclear(found: str, expected: str) -> InputError:
    return InputError("what to run is not clear", found=found, expected=expected, remedy="see mosaic-run --help")


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
