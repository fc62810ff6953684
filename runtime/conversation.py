"""The tokens a sequence has seen, and the one earlier moment it can go back to.

A turn of a chat begins with all earlier turns, so most of a prompt has been computed before. Whatever interrupts a
computation, what is recorded here is true afterwards or known not to be.
"""

from collections.abc import Sequence

from torch import Tensor

from mosaic.runtime.model import HybridModel


class Conversation:
    """One sequence of a model, its tokens, and a mark: tokens and state at the end of the last prompt."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._state = model.new_sequence()
        self._sound = True  # False while state and tokens may disagree
        self.tokens: list[int] = []
        self.mark()

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Final hidden states [T, H] of further tokens."""
        self._sound = False
        hidden = self._model.hidden(tokens, self._state)
        self.tokens.extend(tokens)
        self._sound = True
        return hidden

    def mark(self) -> None:
        """Remember this moment."""
        self._mark = (list(self.tokens), self._state.snapshot())

    def rewind(self, prompt: Sequence[int]) -> bool:
        """Be at the latest known beginning of the prompt, at least one token short of its end; False if there is none.

        Interrupted work is undone by going back to the mark.
        """
        if self._sound and _begins(self.tokens, prompt):
            return True
        past, snapshot = self._mark
        if not _begins(past, prompt):
            return False
        self._sound = False
        self._state.restore(snapshot)
        self.tokens = list(past)
        self._sound = True
        return True

    def release(self) -> None:
        """Give the memory back; the conversation is over."""
        self._state.release()


def _begins(past: list[int], prompt: Sequence[int]) -> bool:
    return len(past) < len(prompt) and past == list(prompt[: len(past)])
