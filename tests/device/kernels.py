"""The tests of every kernel (tests/cuda/kernels), which run on a card where there is one."""

import importlib.util
import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from device.card import Card
from device.lines import Report

ROOT = Path(__file__).parents[2]
TESTS = "tests/cuda/kernels"
REHEARSED = "tests/cuda/test_graphs.py"  # needs no kernel
MOST_WORKERS = 8  # each has a CUDA context of some 400 MB; what takes the time is compiling, by the host


class Outcomes:
    """A plugin of pytest: how many tests of each file had which outcome."""

    def __init__(self) -> None:
        self.files: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes by its call, and may fail or be skipped around it."""
        if report.when == "call" or not report.passed:
            self.files.setdefault(Path(report.location[0]).stem, Counter())[report.outcome] += 1

    def tell(self, report: Report) -> None:
        """A line for each file."""
        for file, counts in sorted(self.files.items()):
            note = f"{counts['failed']} failed, {counts['skipped']} skipped"
            report.add(file, counts["passed"], "tests", passed=not counts["failed"], note=note)


def run(card: Card, report: Report) -> None:
    """Which tests failed goes to standard output."""
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    if importlib.util.find_spec("xdist") and not card.rehearsed:
        options += ["-n", str(min(os.cpu_count() or 1, MOST_WORKERS))]
    outcomes = Outcomes()

    def stop(number: int, frame: FrameType | None) -> None:
        """Time is up. Not by an exception: pytest would wait for its workers."""
        outcomes.tell(report)
        os._exit(1)

    before = signal.signal(signal.SIGTERM, stop)
    code = pytest.main([*options, str(ROOT / (REHEARSED if card.rehearsed else TESTS))], [outcomes])
    signal.signal(signal.SIGTERM, before)
    outcomes.tell(report)
    report.add("exit code of pytest", code, "", passed=code == 0)
