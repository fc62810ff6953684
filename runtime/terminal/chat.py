"""The chat: what is typed, done or answered, until there is no more."""

import os
import sys
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.runtime.terminal import commands
from mosaic.runtime.terminal.figures import Figures, status_text
from mosaic.runtime.terminal.history import history_file
from mosaic.runtime.terminal.keys import silent_keys
from mosaic.runtime.terminal.lines import Keyboard, Lines
from mosaic.runtime.terminal.screen import complain, note

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.terminal.asking import Asker
    from mosaic.runtime.terminal.conversation import Conversation
    from mosaic.runtime.terminal.session import Session

ROOM = "/undo takes the last turn back, /clear forgets the conversation; a larger --context has room for more"


def keyboard() -> Keyboard:
    """The best one that the terminal allows."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return Lines()
    from mosaic.runtime.terminal.editor import Editor

    return Editor(history_file())


class Chat:
    """One conversation at a terminal. After each answer a line of figures, if nothing else was asked for (`status`)."""

    def __init__(
        self,
        engine: "Engine",
        asker: "Asker",
        conversation: "Conversation",
        session: "Session | None",
        keys: Keyboard,
        *,
        status: bool,
    ) -> None:
        self._engine = engine
        self._ask = asker
        self._conversation = conversation
        self._session = session
        self._keys = keys
        self._status = status
        self._figures: Figures | None = None

    def run(self) -> None:
        """Until /exit or the end of input."""
        note(f"{self._engine.model_name}, {self._engine.context:,} tokens of context; /help tells more, Ctrl-D ends")
        if self._conversation.messages:
            note(f"going on after {len(self._conversation.messages)} messages")
        going_on = True
        while going_on:
            try:
                said = self._keys.read()
                going_on = said is not None and self._turn(said)
            except KeyboardInterrupt:  # nothing was said, or a second Ctrl-C: the chat itself goes on
                continue
        self._keep()

    def _turn(self, said: str) -> bool:
        """Do or answer what was said; False if that was the end."""
        conversation = self._conversation
        before = list(conversation.messages)
        try:
            if not said.strip():
                return True
            if commands.is_command(said.strip()) and not said.startswith(" "):
                outcome = commands.run(said.strip(), conversation, self._figures)
                if outcome.text:
                    note(outcome.text)
                if not outcome.answer:
                    return not outcome.over
            else:
                conversation.say(said)
            if not self._answer():
                conversation.messages = before
        except InputError as error:
            conversation.messages = before
            complain(error)
            if "context" in error.problem:
                note(ROOM)
        return True

    def _answer(self) -> bool:
        """Answer what was said last; False if nothing came before Ctrl-C."""
        with silent_keys():
            reply = self._ask(self._conversation)
        self._figures = reply.stats.as_dict()
        if reply.unborn:
            note("stopped before the answer began; your message is taken back")
            return False
        self._conversation.answer(reply.message)
        if self._status:
            note(f"{status_text(self._figures)}\n")
        if reply.full:
            note(ROOM)
        self._keep()
        return True

    def _keep(self) -> None:
        if self._session:
            try:
                self._session.keep(self._engine, self._conversation)
            except InputError as error:
                complain(error)
