"""Ctrl-C at a chosen moment: KeyboardInterrupt before the n-th step that is run in some modules."""

import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType


class InterruptAt:
    """Counts lines, or with `opcodes` instructions, that are run in `files`; `where` it struck, if it did."""

    def __init__(self, step: int, files: Collection[str], *, opcodes: bool = False) -> None:
        self._left = step
        self._files = files
        self._event = "opcode" if opcodes else "line"
        self.where = ""

    def __enter__(self) -> "InterruptAt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object):
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object):
        if event == self._event:
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step
