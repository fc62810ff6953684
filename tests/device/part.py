"""One part of the check: `part.py NAME FILE LAYERS [--rehearse]` appends its lines to a file. Started by check.py."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for device, bench and support

from device import engine, kernels, rates, speed
from device.card import Gpu, Rehearsal
from device.lines import Report


def main(name: str, file: str, layers: str, *rehearse: str) -> None:
    """What was found by then is handed on, and what was made is deleted, when `timeout` ends it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    card, report = Rehearsal() if rehearse else Gpu(), Report(name, Path(file))
    if name == "speed":
        speed.run(card, report, int(layers))
    else:
        {"kernels": kernels, "engine": engine, "rates": rates}[name].run(card, report)


if __name__ == "__main__":
    main(*sys.argv[1:])
