"""What every program has: the frame it runs in, and --version."""

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from mosaic.format.errors import EXIT_BAD_INPUT, InputError


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mosaic {version('mosaic-moe')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]


def run_program(program: Callable[[], object]) -> None:
    """Run a typer program. What the user or the machine can mend becomes its text and exit code 2, without traceback.

    Ctrl-C (130) and a reader that went away (1) are typer's own.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - until the end of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever the locale, and whatever a hostile file holds
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:  # a full disk behind standard output, say
        print(f"error: {error.strerror or error}: {error.filename or 'standard output'}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
    else:
        return
    sys.exit(EXIT_BAD_INPUT)
