"""mosaic-serve's process over a scripted engine: what follows a prompt depends on the prompt's first word.

Arguments: a folder, the seconds of grace, and how loading goes: well, refused, broken, or never.
"""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.format.program import run_program
from mosaic.runtime.request import Request
from mosaic.runtime.serve.program import run
from mosaic.runtime.serve.service import Limits
from mosaic.runtime.tuned import Tuned
from support.scripted import ScriptedEngine, Step


def script(request: Request) -> Iterable[Step]:
    word = bytes(token for token in request.prompt if token < 256).split()[0]
    if word == b"break":
        raise ZeroDivisionError
    if word == b"forever":
        return [72, 105, threading.Event()]
    pause = threading.Event()  # as long as the file is not there
    threading.Thread(target=wait_for, args=(Path(sys.argv[1]) / "go", pause), daemon=True).start()
    return [72, pause, 105, 258]


def wait_for(file: Path, event: threading.Event) -> None:
    while not file.exists():
        event.wait(0.01)
    event.set()


def load() -> ScriptedEngine:
    how = sys.argv[3]
    if how == "refused":
        raise InputError("no such model", remedy="take another")
    if how == "never":
        print("loading", flush=True)
        threading.Event().wait()
    assert how == "well"
    engine = ScriptedEngine(Path(sys.argv[1]))
    engine.scheduler.script = script
    engine.tuned = Tuned(threads=2)
    return engine


if __name__ == "__main__":
    run_program(
        lambda: run(
            load,
            ("tiny",),
            host="127.0.0.1",
            port=0,
            limits=Limits(parallel=2),
            keys=(),
            origins=(),
            grace=float(sys.argv[2]),
            log_level="info",
        )
    )
