"""One error for everything a user can mend, and the frame every program runs in.

Bad input is an `InputError`: file, tensor, found, expected, remedy; exit code 2, no traceback. Anything else that
escapes is a bug of ours and shows its traceback.
"""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2


class InputError(Exception):
    """The input, or what was asked for, cannot be used as it is; nothing of the user's has been changed."""

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        remedy: str,
    ) -> None:
        self.problem = problem
        facts = (("file", file), ("tensor", tensor), ("found", found), ("expected", expected), ("remedy", remedy))
        self.facts = {name: str(value) for name, value in facts if value is not None}
        super().__init__("\n".join([problem, *(f"  {name + ':':<10}{value}" for name, value in self.facts.items())]))


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
