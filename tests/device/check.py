"""Runs the parts of the check, each as a process with a limit of time, and prints one table. Started by check.sh.

A part that fails or is stopped is a line of the table, and the next one begins. Whoever ends the check itself gets a
table of what there is.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for device

from device.lines import Line, Report, read, table
from device.needs import options
from mosaic.format.program import run_program

FOLDER = Path(__file__).parent
#: Seconds that a part may take: together with building less than eight minutes.
LIMITS = {"kernels": 120, "engine": 75, "rates": 65, "speed": 125}
GRACE = 10  # seconds for a part to hand on what it has and to delete its files
STOPPED = 124  # exit code of `timeout`
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Arguments are told by check.sh."""
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
            signal.signal(number, _end)
    asked = options(sys.argv[1:])
    rehearsal = ["--rehearse"] if asked.rehearse else []
    command = [sys.executable, str(FOLDER / "machine.py"), *rehearsal]
    machine = subprocess.run(command, stdout=subprocess.PIPE, process_group=0)
    if machine.returncode:
        sys.exit(machine.returncode)
    facts: dict[str, str] = json.loads(machine.stdout)
    lines: list[Line] = []
    finished = False
    _keep(facts, lines, finished)
    try:
        with TemporaryDirectory() as folder:
            for name in asked.parts:
                _run(name, [str(asked.layers), *rehearsal], Path(folder) / name, lines)
                _keep(facts, lines, finished)
        finished = True
    finally:
        _keep(facts, lines, finished)
        print("\n".join(f"{name:<10}{fact}" for name, fact in facts.items()), end="\n\n")
        print(table(lines))
        failed = sum(line.failed for line in lines)
        verdict = f"{failed} of {len(lines)} lines failed" if failed else "all is right"
        print(f"\n{verdict if finished else 'ended before all parts were run'}")
    sys.exit(1 if failed else 0)


def _end(number: int, frame: FrameType | None) -> None:
    """Once: what is left to do is to end the part, which takes GRACE at most, and to tell what there is."""
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _keep(facts: dict[str, str], lines: Sequence[Line], finished: bool) -> None:
    """In $OUT/check.json, if there is an OUT. At no time it is half written."""
    if out := os.environ.get("OUT"):
        passed = finished and not any(line.failed for line in lines)
        found = {"machine": facts, "finished": finished, "passed": passed, "lines": [line.as_dict() for line in lines]}
        written = Path(out) / "check.json.part"
        written.write_text(json.dumps(found, indent=1))
        written.replace(Path(out) / "check.json")


def _run(name: str, arguments: list[str], file: Path, lines: list[Line]) -> None:
    """Adds a part's lines, and one of itself; if it is ended from outside, those that it has."""
    limit, start = LIMITS[name], time.monotonic()
    print(f"{name}: at most {limit} seconds", file=sys.stderr, flush=True)
    limited = ["timeout", "--foreground", f"--kill-after={GRACE}", str(limit)]  # a signal to it reaches the part once
    command = [*limited, sys.executable, str(FOLDER / "part.py"), name, str(file), *arguments]
    note = "stopped"
    part = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0)
    try:
        code = part.wait()
        note = "" if not code else "stopped: out of time" if code == STOPPED else f"exit code {code}"
    finally:
        part.terminate()
        part.wait()
        Report(name, file).add("whole part", time.monotonic() - start, "s", passed=not note, note=note)
        lines += read(file)


if __name__ == "__main__":
    run_program(main)
