"""The tokens a sequence has seen, and the one earlier moment it can go back to.

A turn of a chat begins with all earlier turns, so most of a prompt has been computed before. Whatever interrupts a
computation, what is recorded here is true afterwards or known not to be.
"""

from collections.abc import Sequence

from torch import Tensor

from mosaic.runtime.model import HybridModel
from mosaic.runtime.state import SequenceState, Snapshot


class Conversation:
    """One sequence of a model, its tokens, and a mark: tokens and state at the end of the last prompt, or none."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._state: SequenceState | None = model.new_sequence()  # None while it may not be that of the tokens
        self._mark: tuple[list[int], Snapshot | None] = ([], None)
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Final hidden states [T, H] of further tokens."""
        state, self._state = self._state, None
        assert state
        hidden = self._model.hidden(tokens, state)
        self.tokens.extend(tokens)
        self._state = state
        return hidden

    def mark(self) -> None:
        """Remember this moment, and no longer the one before: two copies of a state would take their memory."""
        assert self._state
        self._mark = ([], None)
        self._mark = (list(self.tokens), self._state.snapshot())

    def rewind(self, prompt: Sequence[int]) -> None:
        """Be at the latest known beginning of the prompt, at least one token short of its end, if that is nothing.

        Interrupted work is undone by going back to the mark.
        """
        if self._state and _begins(self.tokens, prompt):
            return
        if not _begins(self._mark[0], prompt):
            self._mark = ([], None)
        past, snapshot = self._mark
        self._state = None
        self.tokens = list(past)
        self._state = snapshot.resume() if snapshot else self._model.new_sequence()


def _begins(past: list[int], prompt: Sequence[int]) -> bool:
    return len(past) < len(prompt) and past == list(prompt[: len(past)])
