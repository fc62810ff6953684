"""Ctrl-C while an answer is made: noted, so that work ends where it can be gone on from."""

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """While this is open the first Ctrl-C sets `wanted`. The second is KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        self.wanted, self._before = False, signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # a shell's background process
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
