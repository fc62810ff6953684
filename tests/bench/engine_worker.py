"""Engines as processes that wait until they are asked to measure, so that they can take turns on one machine.

An engine is a program that prints one JSON object per line: {} when it is loaded, then an answer to every line on its
standard input, itself a JSON object of one request: {"decode": tokens} and {"prefill": tokens} are answered with
{"seconds": ...}; engine_mosaic knows two more. Between requests its threads are to sleep.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mosaic.format.errors import InputError

Answer = dict[str, float]


def serve(requests: dict[str, Callable[[float], Answer]]) -> None:
    """The engine's end: answer until standard input ends."""
    answer({})
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        answer(requests[name](argument))


def answer(values: Answer) -> None:
    """One line."""
    print(json.dumps(values), flush=True)


class Worker:
    """An engine's process. What it says on standard error is shown if it fails."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lines = self._answers()
        try:
            next(self._lines)
        except BaseException:
            self.close()
            raise

    def ask(self, request: str, argument: float) -> Answer:
        """Have something measured."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: said where its answer is missed
            self._process.stdin.write(json.dumps({request: argument}) + "\n")
            self._process.stdin.flush()
        return next(self._lines)

    def ask_alone(self, request: str, argument: float) -> Answer:
        """The same of an engine whose threads never sleep: its process is stopped before and after."""
        self._process.send_signal(signal.SIGCONT)
        found = self.ask(request, argument)
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def _answers(self) -> Iterator[Answer]:
        assert self._process.stdout
        for line in self._process.stdout:
            yield json.loads(line)
        code = self._process.wait()
        raise InputError(
            f"the engine {self.name} ended",
            found=f"exit code {code}\n{self._log.read_text(errors='replace')[-2000:]}",
            expected="an answer",
            remedy="leave it out with --engine, or mend it",
        )
