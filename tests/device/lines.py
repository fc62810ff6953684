"""The lines of one table: what parts of the check found, handed on through a file while they are found.

So of a part that had to be ended, what it knew by then is there.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """A figure. `share`: of what the machine can do at most. `passed`: None where nothing is asserted."""

    part: str
    what: str
    value: float
    unit: str
    share: float | None = None
    passed: bool | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        """A figure that is none has failed, too."""
        return self.passed is False or not isfinite(self.value)

    def as_dict(self) -> dict[str, object]:
        """For JSON, which has no infinity."""
        return asdict(self) | {"value": self.value if isfinite(self.value) else None, "failed": self.failed}

    def row(self) -> tuple[str, ...]:
        """Its cells."""
        verdict = "FAIL" if self.failed else "pass" if self.passed else ""
        share = "" if self.share is None else f"{self.share:.0%}"
        return self.part, self.what, f"{_number(self.value)} {self.unit}", share, verdict, self.note


class Report:
    """Takes a part's lines, to a file and, for whoever waits, to standard error."""

    def __init__(self, part: str, file: Path) -> None:
        self.part = part
        self._file = file

    def add(
        self, what: str, value: float, unit: str, share: float | None = None, passed: bool | None = None, note: str = ""
    ) -> None:
        """See Line."""
        line = Line(self.part, what, value, unit, share, passed, note)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        print("  ".join(cell for cell in line.row() if cell), file=sys.stderr, flush=True)


def read(file: Path) -> list[Line]:
    """What was reported; a line that was not written to its end is left out."""
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")
    return [Line(**json.loads(text)) for text in whole.splitlines()]


def table(lines: Sequence[Line]) -> str:
    """What a person reads."""
    head = ("part", "what", "value", "of ceiling", "verdict", "")
    rows = [head, *(line.row() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(_cells(row, widths)).rstrip() for row in rows)


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Figures end where their column ends, words begin where it begins."""
    return [
        text.rjust(width) if column in (2, 3) else text.ljust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _number(value: float) -> str:
    """Four digits, or all of a count."""
    if value == int(value) if isfinite(value) else False:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
