"""What a person types, line by line: for terminals that can do no more, and where the answers go elsewhere."""

import io
import sys
from typing import Protocol

PROMPT, MORE = "> ", ". "


class Keyboard(Protocol):
    """Where messages come from."""

    def read(self) -> str | None:
        """The next message; None at the end of input (Ctrl-D). KeyboardInterrupt: what was typed so far is dropped."""


class Lines:
    """The terminal's own line editing; a backslash at the end of a line goes on in the next one."""

    def __init__(self) -> None:
        self._prompts = sys.stdout if sys.stdout.isatty() else sys.stderr
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # what is not UTF-8 is refused later

    def read(self) -> str | None:
        """See Keyboard."""
        said: list[str] = []
        try:
            while True:
                print(MORE if said else PROMPT, end="", file=self._prompts, flush=True)
                line = sys.stdin.readline()
                if not line:
                    print(file=self._prompts)
                    return "\n".join(said) or None
                said.append(line.removesuffix("\n").removesuffix("\\"))
                if not line.endswith("\\\n"):
                    return "\n".join(said)
        except KeyboardInterrupt:
            print(file=self._prompts)
            raise
