"""Ends a text before the first of some strings. Which strings, and what comes of the rest, is decided elsewhere."""

from collections.abc import Sequence

from mosaic.format.errors import InputError
from mosaic.runtime.text.search import Search


class StopStrings:
    """Lets text through up to the stop string that is complete first (of several at once: the longest)."""

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InputError(
                "a stop string is empty", found='""', expected="at least one character", remedy="leave it out"
            )
        self._search = Search(stop)
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain now to come before any stop string; nothing once one has come."""
        if self.stopped:
            return ""
        before, found, _ = self._search.push(text)
        self.stopped = found is not None
        return before

    def finish(self) -> str:
        """What was held back as the possible beginning of a stop string."""
        return self._search.finish()
