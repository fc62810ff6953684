"""What a reply consists of, as the parts of the reader hand it on."""

from dataclasses import dataclass
from enum import StrEnum


class PieceKind(StrEnum):
    """What a piece is for."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool call"


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants called. `arguments`: a JSON object as text, as the API has it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """Text of one kind, or a whole tool call."""

    kind: PieceKind
    text: str = ""
    call: ToolCall | None = None
