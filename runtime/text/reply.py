"""A model's tokens back into what they say: reasoning, content, tool calls, as they come and exact to the character.

Pieces together are the text of all tokens up to a stop string, less tags and the newlines that touch them, wherever
the tokens divide it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mosaic.runtime.text.pieces import Piece, PieceKind, ToolCall
from mosaic.runtime.text.reasoning import Reasoning
from mosaic.runtime.text.stops import StopStrings
from mosaic.runtime.text.tool_calls import ToolCalls, ToolFormat
from mosaic.runtime.tokenizer import Tokenizer

__all__ = ["Piece", "PieceKind", "ReplyReader", "ToolCall"]


class ReplyReader:
    """Reads one reply, token by token.

    `stop` strings are looked for in the raw text, in reasoning and calls too. `reasoning`: the model may think;
    `inside_reasoning`: the prompt opened it. Without `tool_format`, calls are text. `tools`, in the API's form, type
    the values of XML calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        inside_reasoning: bool = False,
        reasoning: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._characters = tokenizer.stream()
        self._stops = StopStrings(stop)
        self._reasoning = Reasoning(inside_reasoning) if reasoning or inside_reasoning else None
        self._calls = ToolCalls(tool_format, tools) if tool_format else None
        self._over = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string came. Nothing comes after it."""
        return self._stops.stopped

    def push(self, token: int) -> list[Piece]:
        """What one more token makes certain."""
        return self._read(self._characters.push(token))

    def finish(self) -> list[Piece]:
        """What was held back, when no more tokens come."""
        pieces = self._read(self._characters.finish())
        return pieces if self._over else [*pieces, *self._end(self._stops.finish())]

    def _read(self, text: str) -> list[Piece]:
        if self._over:
            return []
        certain = self._stops.push(text)
        return self._end(certain) if self._stops.stopped else self._parted(certain)

    def _end(self, text: str) -> list[Piece]:
        """The last of the text, and all that waited for more."""
        self._over = True
        pieces = self._parted(text)
        if self._reasoning:
            pieces += self._with_calls(self._reasoning.finish())
        return pieces + (self._calls.finish() if self._calls else [])

    def _parted(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._with_calls(self._reasoning.push(text) if self._reasoning else [Piece(PieceKind.CONTENT, text)])

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, with calls found in those that are content."""
        if not self._calls:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.push(piece.text) if piece.kind is PieceKind.CONTENT else [piece]
        return found
