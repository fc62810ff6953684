"""The last line of a terminal, kept for figures while text scrolls above it."""

import os
import sys
import time

INTERVAL = 0.25  # seconds between two looks


class LiveLine:
    """Writes to standard error, and only to a terminal. To be closed, or the terminal keeps a line to itself."""

    def __init__(self) -> None:
        self._shown = 0.0
        self._open = False

    def show(self, text: str) -> None:
        """Replace the line, unless it was replaced just now."""
        if not sys.stderr.isatty() or time.monotonic() - self._shown < INTERVAL:
            return
        self._shown = time.monotonic()
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
        if not self._open:  # scroll once, so that the cursor is not in the last line, then scroll above it only
            print(f"\n\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8", end="", file=sys.stderr)
            self._open = True
        print(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m{text[:columns]}\x1b[0m\x1b8", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Give the line back."""
        if self._open:
            rows = os.get_terminal_size(sys.stderr.fileno()).lines
            print(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8", end="", file=sys.stderr, flush=True)
            self._open = False
