"""One part of the check: `part.py NAME FILE LAYERS [--rehearse]` appends its lines to a file. Started by check.py."""

import importlib
import signal
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for device, bench and support

from device.card import Gpu, Rehearsal
from device.lines import Report
from mosaic.format.program import run_program


def main(name: str, file: str, layers: str, *rehearse: str) -> None:
    """What was found by then is handed on, and what was made is deleted, when `timeout` ends it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    card, report = Rehearsal() if rehearse else Gpu(), Report(name, Path(file))
    options = [int(layers)] if name == "speed" else []
    importlib.import_module(f"device.{name}").run(card, report, *options)


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
