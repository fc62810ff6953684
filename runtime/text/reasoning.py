"""Parts reasoning from content while a reply grows.

A reply is any number of <think> blocks, then content: a tag in the middle of content is content, and so is a </think>
that closes nothing. Reasoning goes on to the first </think>, whatever it mentions. Newlines that touch a tag are of
neither text.
"""

from mosaic.runtime.text.pieces import Piece, PieceKind
from mosaic.runtime.text.search import TagSearch

OPEN, CLOSE = "<think>", "</think>"


class Reasoning:
    """Splits the text of a reply. `inside`: the prompt ends in an open <think>; the reply may open it again."""

    def __init__(self, inside: bool) -> None:
        self._after_tag(PieceKind.REASONING if inside else PieceKind.CONTENT)
        if not inside:
            self._search = TagSearch(OPEN)  # newlines that begin the reply touch no tag yet

    def _after_tag(self, kind: PieceKind) -> None:
        """Text of this kind comes next, unless a <think> does."""
        self._kind = kind
        self._leading = True
        self._search = TagSearch(OPEN, after_tag=True)

    def push(self, text: str) -> list[Piece]:
        """The pieces that further text completes."""
        pieces: list[Piece] = []
        while text:
            if not self._leading and self._kind is PieceKind.CONTENT:
                return [*pieces, Piece(self._kind, text)]
            before, found, after = self._search.push(text)
            if not self._leading:
                if before:
                    pieces.append(Piece(self._kind, before))
                if found is not None:
                    self._after_tag(PieceKind.CONTENT)
                text = after
            elif before:  # there is text of this kind, so the time of opening tags is over: read it again
                text = before + (self._search.finish() if found is None else found + after)
                self._leading = False
                self._search = TagSearch(CLOSE)
            else:
                if found is not None:
                    self._after_tag(PieceKind.REASONING)
                text = after
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back as the possible beginning of a tag."""
        held = self._search.finish()
        return [Piece(self._kind, held)] if held else []
