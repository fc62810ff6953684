"""What a person types at a terminal: several lines, pasted or not, with history and completion of commands.

The only user of prompt_toolkit, which takes a while to import: to be imported when a chat begins.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from mosaic.runtime.terminal.commands import COMMANDS
from mosaic.runtime.terminal.history import add_to_history, read_history
from mosaic.runtime.terminal.lines import MORE, PROMPT
from mosaic.runtime.terminal.screen import note
from mosaic.runtime.terminal.settings import KINDS


class Editor:
    """See Keyboard. Enter sends; Alt+Enter, or a backslash before Enter, begins a new line."""

    def __init__(self, history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            history=_Kept(history),
            completer=_Commands(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_bindings(),
            enable_suspend=True,
            reserve_space_for_menu=0,
        )

    def read(self) -> str | None:
        """See Keyboard."""
        try:
            return self._session.prompt()
        except EOFError:
            return None


class _Kept(History):
    """History in a file. Where it cannot be written it lasts as long as the chat."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._told = False

    def load_history_strings(self) -> Iterable[str]:
        return reversed(read_history(self._file))

    def store_string(self, string: str) -> None:
        try:
            add_to_history(self._file, string)
        except OSError as error:
            if not self._told:
                note(f"note: what is typed is not kept: {self._file}: {error.strerror}")
            self._told = True


class _Commands(Completer):
    """Names of commands, and what can stand after some."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        command, space, rest = typed.partition(" ")
        if not typed.startswith("/"):
            return
        if not space:
            yield from _beginning(typed, [f"/{name}" for name in COMMANDS])
        elif command in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest), complete_event)
        elif command == "/set" and " " not in rest:
            yield from _beginning(rest, list(KINDS))
        elif command == "/think":
            yield from _beginning(rest, ["on", "off"])


def _beginning(typed: str, words: list[str]) -> Iterator[Completion]:
    return (Completion(word, -len(typed)) for word in words if word.startswith(typed))


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings
