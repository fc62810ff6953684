"""Runs the parts of the check, each as a process with a limit of time, and prints one table. Started by check.sh.

A part that fails or is stopped is a line of the table, and the next one begins.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for device

from device.lines import Line, Report, read, table
from mosaic.format.errors import InputError, run_program

FOLDER = Path(__file__).parent
#: Seconds that a part may take: together with building less than eight minutes.
LIMITS = {"kernels": 120, "engine": 75, "rates": 65, "speed": 125}
PARITY = "kernels,engine"
GRACE = 10  # seconds for a part to hand on what it has and to delete its files
STOPPED = 124  # exit code of `timeout`
LAYERS = 8

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    parts: Annotated[str, typer.Option(metavar="NAMES")] = ",".join(LIMITS),
    quick: Annotated[bool, typer.Option("--quick")] = False,
    layers: Annotated[int, typer.Option(min=1)] = LAYERS,
    rehearse: Annotated[bool, typer.Option("--rehearse")] = False,
) -> None:
    """The options are told by check.sh."""
    names = (PARITY if quick else parts).split(",")
    if unknown := set(names) - LIMITS.keys():
        wrong, expected = ", ".join(sorted(unknown)), f"some of {','.join(LIMITS)}"
        raise InputError("no such part", found=wrong, expected=expected, remedy="choose one of these")
    rehearsal = ["--rehearse"] if rehearse else []
    machine = subprocess.run([sys.executable, FOLDER / "machine.py", *rehearsal], stdout=subprocess.PIPE)
    if machine.returncode:
        sys.exit(machine.returncode)
    facts: dict[str, str] = json.loads(machine.stdout)
    with TemporaryDirectory() as folder:
        lines = [line for name in names for line in _run(name, [str(layers), *rehearsal], Path(folder) / name)]
    print("\n".join(f"{name:<10}{fact}" for name, fact in facts.items()), end="\n\n")
    print(table(lines))
    failed = sum(line.failed for line in lines)
    print(f"\n{failed} of {len(lines)} lines failed" if failed else "\nall is right")
    if out := os.environ.get("OUT"):
        found = {"machine": facts, "passed": not failed, "lines": [line.as_dict() for line in lines]}
        (Path(out) / "check.json").write_text(json.dumps(found, indent=1))
    sys.exit(1 if failed else 0)


def _run(name: str, arguments: list[str], file: Path) -> list[Line]:
    """A part's lines, and one of itself."""
    limit, start = LIMITS[name], time.monotonic()
    print(f"{name}: at most {limit} seconds", file=sys.stderr, flush=True)
    limited = ["timeout", "--foreground", f"--kill-after={GRACE}", str(limit)]  # in reach of Ctrl-C
    command = [*limited, sys.executable, str(FOLDER / "part.py"), name, str(file), *arguments]
    code = subprocess.run(command, stdout=sys.stderr).returncode
    note = "" if not code else "stopped: out of time" if code == STOPPED else f"exit code {code}"
    Report(name, file).add("whole part", time.monotonic() - start, "s", passed=not code, note=note)
    return read(file)


if __name__ == "__main__":
    run_program(app)
