"""Answers on a terminal and in a pipe: to the byte in one, without control in the other."""

import io
import re

import pytest

from mosaic.runtime.terminal.display import Display
from mosaic.runtime.terminal.screen import DIM, PLAIN, safe
from mosaic.runtime.text.reply import Piece, PieceKind

THOUGHT, SAID = PieceKind.REASONING, PieceKind.CONTENT
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31m\x7f\r\nc\td\u202ee"


class Out(io.StringIO):
    """Standard output that is, or is not, a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(pieces, *, terminal=True, thinking=None) -> str:
    out = Out(terminal)
    display = Display(out, thinking)
    for number, (kind, text) in enumerate(pieces, 1):
        display.show(Piece(kind, text), number)
    display.end()
    return out.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[\d*[A-Za-z]", "", text)


REASONED = [(THOUGHT, "Well"), (THOUGHT, ", so"), (SAID, "Yes"), (SAID, ".")]


def test_a_pipe_gets_the_content_and_a_newline():
    assert shown(REASONED, terminal=False) == "Yes.\n"
    assert shown([(SAID, HOSTILE)], terminal=False) == f"{HOSTILE}\n"
    assert shown([(SAID, "line\n")], terminal=False) == "line\n\n"
    assert shown([], terminal=False) == "\n"


def test_a_pipe_gets_reasoning_if_asked_for():
    assert shown(REASONED, terminal=False, thinking=True) == "<think>\nWell, so\n</think>\n\nYes.\n"
    assert shown(REASONED, terminal=False, thinking=False) == "Yes.\n"


def test_reasoning_is_dimmed_and_the_answer_is_not():
    text = shown(REASONED)
    assert text == f"{DIM}Well{PLAIN}{DIM}, so{PLAIN}\n\nYes.\n"


def test_hidden_reasoning_becomes_a_line():
    text = shown(REASONED, thinking=False)
    assert "Well" not in text
    assert re.search(r"thought for 2 tokens, 0\.\d s\n\nYes\.\n$", plain(text))
    cut = shown(REASONED[:2], thinking=False)
    assert re.search(r"thought for 2 tokens, 0\.\d s\s*$", plain(cut))


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_terminal_without_styles_gets_none(monkeypatch, variable):
    monkeypatch.setenv(*variable)
    assert shown(REASONED) == "<think>\nWell, so\n</think>\n\nYes.\n"
    assert "\x1b" not in shown(REASONED, thinking=False)


def test_nothing_that_controls_reaches_a_terminal():
    for kind in (THOUGHT, SAID):
        text = plain(shown([(kind, HOSTILE)]))
        assert text.rstrip("\n") == "a\u241b[2J\u241b]0;title\u2407b\ufffd31m\u2421\nc\td\ufffde"
    for code in [*range(0x20), *range(0x7F, 0xA0)]:
        made = safe(chr(code))
        assert made == chr(code) if made in "\n\t" and made else all(ord(each) >= 0xA0 for each in made)
    assert safe("\u00e9\u4e2d\U0001f600\u200d") == "\u00e9\u4e2d\U0001f600\u200d"


def test_a_terminal_line_is_ended_once():
    assert shown([(SAID, "line\n")]) == "line\n"
    assert shown([(SAID, "line")]) == "line\n"
    assert shown([]) == ""
