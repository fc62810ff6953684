"""What may be written to a terminal: text without control, and a few styles where the terminal knows them."""

import os
import sys
from typing import TextIO

from mosaic.format.errors import InputError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[2K"

#: A model's text is not to move the cursor, rename the window or answer for the keyboard: C0 becomes its own picture,
#: C1 and what turns the direction of writing the replacement character; a carriage return nothing.
_CONTROLS = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"}
    | {ord("\r"): "", 0x7F: "\u2421"}
    | dict.fromkeys((*range(0x7F + 1, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
)


def safe(text: str) -> str:
    """The text as a terminal may have it: newlines, tabs and what is printed, but nothing that controls."""
    return text.translate(_CONTROLS)


def styled(stream: TextIO) -> bool:
    """Whether a stream ends at a terminal that knows escape sequences, and they are welcome (NO_COLOR)."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def dimmed(text: str, stream: TextIO) -> str:
    """The text, less bright where that is possible."""
    return f"{DIM}{text}{PLAIN}" if text and styled(stream) else text


def note(text: str) -> None:
    """Tell a person something beside the answers, on standard error."""
    print(dimmed(_for_stderr(text), sys.stderr), file=sys.stderr, flush=True)


def complain(error: InputError) -> None:
    """Tell of an error that a program can go on after."""
    print(_for_stderr(f"error: {error}"), file=sys.stderr, flush=True)


def _for_stderr(text: str) -> str:
    return safe(text) if sys.stderr.isatty() else text
