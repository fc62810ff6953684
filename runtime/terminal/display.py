"""An answer on standard output: as it comes, for a person at a terminal or for whatever is at the end of a pipe.

A pipe is given the content to the byte; a terminal is given nothing that would control it.
"""

import io
import time
from typing import TYPE_CHECKING, TextIO

from mosaic.runtime.terminal.screen import CLEAR_LINE, dimmed, safe, styled

if TYPE_CHECKING:
    from mosaic.runtime.text.reply import Piece

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class Display:
    """Shows one answer. `thinking`: whether its reasoning is shown; None: at a terminal only."""

    def __init__(self, out: TextIO, thinking: bool | None = None) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._styled = styled(out)
        self._shown = self._terminal if thinking is None else thinking
        self._thinking_since: float | None = None
        self._first = self._tokens = 0  # of the answer before the reasoning, and with it
        self._last = "\n"
        if not self._terminal and isinstance(out, io.TextIOWrapper):
            out.reconfigure(encoding="utf-8")

    def show(self, piece: "Piece", tokens: int) -> None:
        """The next piece of the answer, when it has so many tokens."""
        from mosaic.runtime.text.reply import PieceKind

        if piece.kind is PieceKind.REASONING:
            self._reason(piece.text, tokens)
        elif piece.text:
            self._end_reasoning()
            self._write(piece.text)

    def end(self) -> None:
        """There is no more."""
        self._end_reasoning()
        if not self._terminal or self._last != "\n":
            self._write("\n")

    def _reason(self, text: str, tokens: int) -> None:
        self._tokens = tokens
        if self._thinking_since is None:
            self._thinking_since, self._first = time.monotonic(), tokens - 1
            if self._shown and not self._styled:
                self._write(OPEN)
        if not self._shown and self._styled:
            self._out.write(CLEAR_LINE + dimmed(f"thinking: {self._tokens - self._first:,} tokens", self._out))
            self._out.flush()
        elif self._shown:
            self._write(text, dim=True)

    def _end_reasoning(self) -> None:
        since, self._thinking_since = self._thinking_since, None
        if since is None:
            return
        if self._shown:
            self._write("\n\n" if self._styled else CLOSE)
        elif self._terminal:
            seconds, count = time.monotonic() - since, self._tokens - self._first
            if self._styled:
                self._out.write(CLEAR_LINE)
            self._write(f"thought for {count:,} tokens, {seconds:.1f} s\n\n", dim=True)

    def _write(self, text: str, *, dim: bool = False) -> None:
        text = safe(text) if self._terminal else text
        self._last = text[-1:] or self._last
        self._out.write(dimmed(text, self._out) if dim else text)
        self._out.flush()
