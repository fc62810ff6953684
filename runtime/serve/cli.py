"""mosaic-serve: a model directory behind the OpenAI API. Heavy imports wait until the arguments are sound."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mosaic.format.errors import InputError
from mosaic.format.program import Version, run_program
from mosaic.runtime import options
from mosaic.runtime.sizes import parse_size

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


ORIGIN = re.compile(r"https?://[^/\s]+")


class LogLevel(StrEnum):
    """How much is told on standard error."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


@app.command()
def command(
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Model directory; left out with --demo.")] = None,
    demo: options.Demo = False,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8080,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Sequences in work at a time; each has --context.")] = 2,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait beyond these.")] = 64,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Longest body of a request.")] = "4MiB",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for a client to send its request, or to take any of its answer.")
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers have after SIGINT or SIGTERM.")
    ] = 30.0,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of the model, beside its directory's; repeatable.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Ask for a key: this one, or another given so.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Keys, one a line.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Web site whose pages may use the server; repeatable.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least weight of what is logged.")] = LogLevel.INFO,
    context: options.Context = None,
    kv: options.KV = "bf16",
    ram: options.Ram = None,
    state_budget: options.StateBudget = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    gpu_layers: options.GpuLayers = None,
    ops: options.OpsChoice = "cpu",
    activations: options.ActivationsChoice = "f32",
    threads: options.TunedThreads = None,
    warm: options.Warm = None,
    record_routing: options.RecordRouting = None,
    prefetch: options.Prefetch = False,
    check: options.Check = False,
    version: Version = False,
) -> None:
    """Serve the model in OUT: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Any client of the OpenAI API can use it: its base URL is http://127.0.0.1:8080/v1. When the model is loaded, the
    address is printed on standard output; each request makes a line on standard error, without what was said in it.

    SIGINT or SIGTERM ends it when the running answers are done, or --grace is over; a second one at once.

    Exit codes: 0 ended by a signal, 1 the engine failed, 2 bad input or refused.
    """
    options.one_model(out, demo, "mosaic-serve")
    longest, slots = parse_size("--max-body", max_body), options.vram_size(device, vram, gpu_layers)
    keys = _keys(api_key or [], api_key_file)
    for origin in cors_origin or []:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            expected, remedy = "as a browser sends it, https://chat.example.org or with a port; or *", "write it so"
            raise InputError("--cors-origin is no web site", found=origin, expected=expected, remedy=remedy)
    try:
        from mosaic.runtime.serve.program import run
    except ImportError as error:
        raise InputError(
            "the server needs further packages", found=error, remedy="pip install 'mosaic-moe[serve]'"
        ) from error
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.loading import LoadOptions
    from mosaic.runtime.serve.service import Limits

    memory, states = options.size("--ram", ram), options.size("--state-budget", state_budget)
    folder = options.model_folder(out)

    def load() -> Engine:
        return Engine.load(
            folder,
            ram=memory,
            context=context,
            kv=kv,
            parallel=parallel,
            state_budget=states,
            device=device,
            vram=slots,
            gpu_layers=gpu_layers,
            ops=ops,
            activations=activations,
            threads=threads,
            options=LoadOptions(check, prefetch, warm, record_routing),
        )

    run(
        load,
        (*(alias or ()), "demo" if demo else folder.resolve().name),
        host=host,
        port=port,
        limits=Limits(parallel, max_queue, longest, timeout),
        keys=keys,
        origins=cors_origin or [],
        grace=grace,
        log_level=log_level,
    )


def _keys(given: list[str], file: Path | None) -> list[str]:
    """All keys there are."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "no UTF-8"
        remedy = "check the path"
        raise InputError("--api-key-file cannot be read", file=file, found=found, remedy=remedy) from error
    keys = [*given, *filter(None, map(str.strip, lines))]
    if "" in keys or (file and len(keys) == len(given)):
        raise InputError(
            "an API key is empty", file=file, expected="some characters", remedy="write one, or leave it out"
        )
    return keys


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
