"""Options that several programs have: names, help and checks. Loads nothing heavy."""

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from mosaic.format.errors import InputError
from mosaic.recipes import demo_model
from mosaic.runtime.sizes import parse_size

Choice = TypeVar("Choice", bound=StrEnum)
THREADS_VARIABLE = "MOSAIC_THREADS"
DEVICE = re.compile(r"(cpu|auto|cuda)|(cuda):([0-9]{1,3})")


Out = Annotated[Path | None, typer.Argument(metavar="OUT", help="Model directory; left out with --demo.")]
Demo = Annotated[bool, typer.Option("--demo", help="Use the embedded demo model instead of OUT.")]
Context = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's, if memory allows.")
]
KV = Annotated[str, typer.Option("--kv", help="How keys and values are kept: f32, bf16 or e4m3.")]
OpsChoice = Annotated[str, typer.Option("--ops", help="Who computes: cpu, or reference (slow, float64).")]
ActivationsChoice = Annotated[
    str, typer.Option("--activations", help="What E4M3 weights are multiplied with: f32, or bf16 where the CPU can.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, envvar=THREADS_VARIABLE, help="Threads to use; default: all cores."),
]
TunedThreads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        envvar=THREADS_VARIABLE,
        help="Threads to use; default: as mosaic-run --tune found, or all cores.",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to take, as 8GiB; default: what is free, but for some head-room."),
]
StateBudget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for states that later prompts go on from; default: for 2 to 16 of them."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N or auto: the GPU if there is one that can be used, else the CPU.",
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="GPU memory for experts; default: as tuned, or 3.2GiB and what nothing else needs."
    ),
]
GpuLayers = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="First layers on the GPU, experts not counted; default: all that fit."),
]
Warm = Annotated[Path | None, typer.Option(metavar="FILE", help="Routing profile: experts to read at the start.")]
RecordRouting = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write (or continue) a trace of the router's choices.")
]
Prefetch = Annotated[bool, typer.Option("--prefetch", help="Read experts that the next layer will probably choose.")]
Check = Annotated[bool, typer.Option("--check", help="Compare the checksum of every expert that is read.")]


def size(option: str, text: str | None) -> int | None:
    """Bytes of a size, if there is one."""
    return None if text is None else parse_size(option, text)


def parse_device(text: str) -> tuple[str, int | None]:
    """(cpu, cuda or auto, the number of a GPU or None) of what --device says; InputError if that is no device."""
    match = DEVICE.fullmatch(text)
    if match is None:
        expected, remedy = "cpu, cuda, cuda:N with the number of a GPU, or auto", "choose one of them"
        raise InputError("no such --device", found=text, expected=expected, remedy=remedy)
    alone, kind, number = match.groups()
    return (alone, None) if alone else (kind, int(number))


def vram_size(device: str, vram: str | None, gpu_layers: int | None) -> int | None:
    """Bytes of --vram, if there are any; InputError for no device, and for what the CPU has no use for."""
    kind, _ = parse_device(device)
    for option, given in (("--vram", vram), ("--gpu-layers", gpu_layers)):
        if kind == "cpu" and given is not None:
            raise InputError(
                f"{option} means nothing with --device cpu",
                found="both of them",
                expected="one",
                remedy=f"leave {option} out",
            )
    return size("--vram", vram)


def one_model(out: Path | None, demo: bool, program: str) -> None:
    """InputError unless exactly one of OUT and --demo is given."""
    if demo == (out is not None):
        raise InputError(
            "which model is not clear",
            found="OUT and --demo together" if demo else "neither OUT nor --demo",
            expected="one of them",
            remedy=f"see {program} --help",
        )


def choice(option: str, text: str | None, choices: type[Choice]) -> Choice | None:
    """The choice that an option's text names, if there is one; InputError if it is none of them."""
    try:
        return None if text is None else choices(text)
    except ValueError as error:
        expected, remedy = ", ".join(choices), "choose one of them"
        raise InputError(f"no such {option}", found=text, expected=expected, remedy=remedy) from error


def refuse_beside(invocation: typer.Context, mode: str, ignored: Callable[[str], bool]) -> None:
    """InputError for what was typed beside the option `mode` and would be ignored: names of parameters."""
    for parameter in invocation.command.params:
        source = invocation.get_parameter_source(parameter.name or "")
        if source and source.name == "COMMANDLINE" and ignored(parameter.name or ""):
            option = parameter.opts[0] if parameter.param_type_name == "option" else (parameter.name or "").upper()
            raise InputError(
                f"{option} means nothing with {mode}",
                found="both of them",
                expected="one",
                remedy=f"leave {option} out",
            )


def model_folder(out: Path | None) -> Path:
    """OUT, or the demo, which is converted now if it was not before."""
    return demo_model() if out is None else out
