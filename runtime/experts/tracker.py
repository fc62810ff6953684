"""How often each expert was used within the last tokens. Sees every routing decision, wherever the expert lies."""

from collections import Counter, deque
from collections.abc import Iterable


class Tracker:
    """Uses per key over a rolling window of tokens, the one that is being computed included."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} tokens")
        self._uses: Counter[int] = Counter()
        self._tokens: deque[list[int]] = deque([[]], maxlen=window)  # keys used by each token, the current one last

    def observe(self, keys: Iterable[int]) -> None:
        """Count what the router chose in a layer for the current token."""
        used = list(keys)
        self._uses.update(used)
        self._tokens[-1] += used

    def tick(self) -> None:
        """The current token is done; the one that leaves the window no longer counts."""
        if len(self._tokens) == self._tokens.maxlen:
            self._uses.subtract(self._tokens[0])
        self._tokens.append([])

    def uses(self, key: int) -> int:
        """Uses of a key within the window."""
        return self._uses[key]
