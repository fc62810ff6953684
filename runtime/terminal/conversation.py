"""A conversation: its messages in the API's form and its settings, and the document that both are kept in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.runtime.terminal.settings import Settings

VERSION = 1
ROLES = ("system", "user", "assistant")

Message = dict[str, Any]


class Conversation:
    """What was said, and how answers are to be made.

    `raw`: every message of the user is a text to continue, and those before it are forgotten.
    """

    def __init__(self, settings: Settings, *, raw: bool = False) -> None:
        self.settings = settings
        self.raw = raw
        self.messages: list[Message] = []

    @property
    def system(self) -> str | None:
        """What the model is told before all else."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[0 if self.system is None else 1 :]
        self.messages = ([] if text is None else [{"role": "system", "content": text}]) + rest

    @property
    def last(self) -> str | None:
        """What the user said last."""
        return next((str(each["content"]) for each in reversed(self.messages) if each["role"] == "user"), None)

    def say(self, text: str) -> None:
        """The user's next message."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, message: Message) -> None:
        """The assistant's."""
        self.messages.append(message)

    def clear(self) -> None:
        """Forget what was said, but not what the model is told before."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def take_back(self) -> str | None:
        """Forget the user's last message and what followed it; the message, if there is one."""
        said = self.last
        while said is not None and self.messages.pop()["role"] != "user":
            pass
        return said

    def document(self) -> dict[str, Any]:
        """All of it, as JSON can have it."""
        return {"version": VERSION, "messages": self.messages, "settings": self.settings.as_dict()}

    def restore(self, document: Mapping[str, Any], file: Path) -> None:
        """Become the conversation of a document; InputError, and no change, if it is none."""
        if document.get("version", VERSION) != VERSION:
            raise _refused(file, f"version {document['version']!r}", f"version {VERSION}")
        messages, values = document.get("messages"), document.get("settings", {})
        if not isinstance(messages, list) or not isinstance(values, dict):
            raise _refused(file, "no list of messages, or settings that are no object", "both")
        for number, message in enumerate(messages):
            _check(message, number, file)
        self.settings = self.settings.updated(values)
        self.messages = [dict(message) for message in messages]

    def save(self, file: Path) -> None:
        """Write the document. A file that is no conversation is left alone: InputError."""
        if file.exists():  # who overwrites knows what is lost
            try:
                Conversation(Settings(self.settings.defaults)).load(file)
            except InputError as error:
                problem, expected = "there is another file of this name", "a saved conversation, or none"
                remedy = "choose another name"
                raise InputError(problem, file=file, found=error.problem, expected=expected, remedy=remedy) from error
        try:
            write_durably(file, to_bytes(self.document(), 1))
        except OSError as error:
            expected, remedy = "a file that can be written", "choose another place"
            problem = "cannot save the conversation"
            raise InputError(problem, file=file, found=error.strerror, expected=expected, remedy=remedy) from error

    def load(self, file: Path) -> None:
        """Become the conversation of a file; InputError, and no change, if there is none."""
        try:
            document = read_json(file)
        except InputError as error:
            expected, remedy = "a file of /save", "choose another file; a session is for --session"
            problem, found = "not a saved conversation", f"{error.problem}: {error.facts.get('found', '')}"
            raise InputError(problem, file=file, found=found, expected=expected, remedy=remedy) from error
        self.restore(document, file)


def _check(message: Any, number: int, file: Path) -> None:
    """A message that a conversation without tools can have."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise _refused(file, f"{where}: {str(message)[:80]}", f"an object with a role: {', '.join(ROLES)}")
    texts = [message.get("content"), message.get("reasoning_content", "")]
    if not all(isinstance(text, str) for text in texts) or message.keys() - {"role", "content", "reasoning_content"}:
        raise _refused(file, f"{where}: {str(message)[:80]}", "content (and reasoning_content) as text, and no more")
    if message["role"] == "system" and number:
        raise _refused(file, f"{where}: a system message", "one at the beginning at most")


def _refused(file: Path, found: str, expected: str) -> InputError:
    remedy = "choose another file"
    return InputError("not a saved conversation", file=file, found=found, expected=expected, remedy=remedy)
