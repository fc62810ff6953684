"""--session: a conversation and what the model remembers of it, over several processes."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.runtime.terminal.conversation import Conversation

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine


class Session:
    """A session file, which need not exist yet. InputError if it could not be written."""

    def __init__(self, file: Path) -> None:
        self._file = file.expanduser()
        self._kept: object = None  # the document that the file has
        self._seen: object = None  # what tells the file that we read or wrote from any other
        if self._file.is_dir() or not self._file.parent.is_dir():
            raise InputError(
                "--session cannot be written",
                file=file,
                found="a directory" if self._file.is_dir() else "no such folder",
                expected="a file, or a new one in a folder that exists",
                remedy="choose another place",
            )

    def restore(self, engine: "Engine", conversation: Conversation) -> None:
        """Go on from the file, if it is there. InputError if it is of another model, or damaged."""
        if self._file.exists():
            self._seen = self._identity()
            self._kept = document = engine.load_session(self._file)
            conversation.restore(document, self._file)

    def keep(self, engine: "Engine", conversation: Conversation) -> None:
        """Write it anew, if anything is new: afterwards the old one is there, or the new one."""
        document = copy.deepcopy(conversation.document())
        if document == self._kept:
            return
        if self._identity() != self._seen:
            raise InputError(
                "the session was changed by another program meanwhile",
                file=self._file,
                found="other bytes than this program left there",
                expected="one program at a time",
                remedy="keep this conversation with /save, and end one of the two",
            )
        try:
            engine.save_session(self._file, document)
        except OSError as error:
            found, remedy = error.strerror, "make room, or choose another place"
            raise InputError("the session cannot be kept", file=self._file, found=found, remedy=remedy) from error
        self._kept, self._seen = document, self._identity()

    def _identity(self) -> tuple[int, int, int] | None:
        """Of the file as it is now; None if there is none."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
