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
            self._kept = document = engine.load_session(self._file)
            conversation.restore(document, self._file)

    def keep(self, engine: "Engine", conversation: Conversation) -> None:
        """Write it anew, if anything is new: afterwards the old one is there, or the new one."""
        document = copy.deepcopy(conversation.document())
        if document == self._kept:
            return
        try:
            engine.save_session(self._file, document)
        except OSError as error:
            found, remedy = error.strerror, "make room, or choose another place"
            raise InputError("the session cannot be kept", file=self._file, found=found, remedy=remedy) from error
        self._kept = document
