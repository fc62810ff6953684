"""Strings looked for in a text that comes in pieces, however it is cut.

Nothing but the true beginning of what is looked for is held back, and every character is looked at a bounded number of
times. What a find means is the business of others.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """What a further piece of text settles."""

    before: str  # certain to come before anything that is looked for
    found: str | None = None
    after: str = ""  # not looked at; empty when nothing was found


class Search:
    """Finds the first of some strings: the one complete first, and of those complete at once the longest.

    The method is that of Knuth, Morris and Pratt, for each string. After a find it starts afresh.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._borders = [_borders(string) for string in strings]
        self._reached = [0] * len(strings)  # how much of each string the text ends with

    def push(self, text: str) -> Part:
        """Further text, up to the first find. Texts together are `before`, `found`, `after`, and what is held back."""
        string, length = self._held()
        for position, character in enumerate(text, 1):
            found = self._advance(character)
            if found is not None:
                self._reached = [0] * len(self._strings)
                certain = length + position - len(found)
                return Part(_joined(string, length, text, certain), found, text[position:])
        return Part(_joined(string, length, text, length + len(text) - self._held()[1]))

    def finish(self) -> str:
        """What is held back, when no more text comes."""
        string, length = self._held()
        self._reached = [0] * len(self._strings)
        return string[:length]

    def _held(self) -> tuple[str, int]:
        """The string of which the text ends with the longest beginning, and the length of that."""
        length, string = max(zip(self._reached, self._strings, strict=True), default=(0, ""))
        return string, length

    def _advance(self, character: str) -> str | None:
        """The longest string that one more character completes."""
        found: str | None = None
        for index, string in enumerate(self._strings):
            reached = self._reached[index]
            while reached and string[reached] != character:
                reached = self._borders[index][reached - 1]
            reached += string[reached] == character
            self._reached[index] = reached
            if reached == len(string) and (found is None or reached > len(found)):
                found = string
        return found


class TagSearch:
    """Finds a tag together with the newlines before it; `found` has them. `after_tag`: drop those at the beginning."""

    def __init__(self, tag: str, *, after_tag: bool = False) -> None:
        self._search = Search([tag])
        self._newlines = 0  # how many the text ends with, so far
        self._dropping = after_tag

    def push(self, text: str) -> Part:
        """As `Search.push`."""
        if self._dropping:
            text = text.lstrip("\n")
            self._dropping = not text
        before, found, after = self._search.push(text)
        body = before.rstrip("\n")
        newlines = len(before) - len(body)
        if body:
            body = "\n" * self._newlines + body
            self._newlines = newlines
        else:
            self._newlines += newlines
        if found is not None:
            found = "\n" * self._newlines + found
            self._newlines = 0
        return Part(body, found, after)

    def finish(self) -> str:
        """What is held back, when no more text comes."""
        newlines, self._newlines = self._newlines, 0
        return "\n" * newlines + self._search.finish()


def _borders(string: str) -> list[int]:
    """For each beginning of the string: the length of its longest proper beginning that it also ends with."""
    lengths = [0] * len(string)
    for end in range(1, len(string)):
        length = lengths[end - 1]
        while length and string[length] != string[end]:
            length = lengths[length - 1]
        lengths[end] = length + (string[length] == string[end])
    return lengths


def _joined(string: str, length: int, text: str, certain: int) -> str:
    """The first `certain` characters of string[:length] + text, without copying the others."""
    return string[: min(length, certain)] + text[: max(certain - length, 0)]
