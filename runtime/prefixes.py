"""Snapshots to begin prompts from: the longest known beginning of a prompt need not be computed again.

Not how much memory their keys and values take: pages are shared, and whoever knows how many there may be calls `evict`.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from mosaic.runtime.state import Snapshot


class StateCache:
    """Snapshots by the tokens they have seen. `budget`: most bytes of recurrent states they may hold together.

    What was not put or found for longest goes first. All must be of one model.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first; see `_key`

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of recurrent states that it holds. May be asked for by any thread."""
        return sum(snapshot.nbytes for snapshot in list(self._entries.values()))

    def put(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Keep a snapshot of a sequence of these tokens, if it fits the budget at all.

        It replaces what it makes needless: that of the same tokens and, if it is cuttable, those of its beginnings.
        """
        assert len(tokens) == snapshot.length
        key = _key(tokens)
        for known, other in list(self._entries.items()):
            if known == key or (other.cuttable and key.startswith(known)):
                del self._entries[known]
        if self.make_room(snapshot.nbytes):
            self._entries[key] = snapshot

    def make_room(self, nbytes: int) -> bool:
        """Evict until a snapshot of so many bytes fits; False, and nothing done, if none of that size can."""
        if nbytes > self.budget:
            return False
        while self.nbytes + nbytes > self.budget:
            self.evict()
        return True

    def longest(self, prompt: Sequence[int], at_most: int) -> tuple[Snapshot, int] | None:
        """The snapshot that most of a prompt can begin from, and at which length (1 to `at_most`) to resume it."""
        wanted, best, best_length = _key(prompt), None, 0
        for key, snapshot in reversed(self._entries.items()):
            if snapshot.cuttable:
                length = min(_common(key, wanted), at_most)
            else:
                length = snapshot.length if snapshot.length <= at_most and wanted.startswith(key) else 0
            if length > best_length:
                best, best_length = key, length
        if best is None:
            return None
        self._entries.move_to_end(best)
        return self._entries[best], best_length

    def evict(self) -> bool:
        """Forget the least recently used; False if there is none."""
        if self._entries:
            self._entries.popitem(last=False)
            return True
        return False

    def items(self) -> list[tuple[list[int], Snapshot]]:
        """Tokens and snapshots, least recently used first: what `put` in this order would bring back."""
        return [(_tokens(key), snapshot) for key, snapshot in self._entries.items()]


def _key(tokens: Sequence[int]) -> bytes:
    """Tokens in four bytes each: a beginning of them is a beginning of these."""
    return np.array(tokens, np.int32).tobytes()


def _tokens(key: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(key, np.int32).tolist()
    return tokens


def _common(key: bytes, other: bytes) -> int:
    """How many tokens two keys begin with alike."""
    length = min(len(key), len(other)) // np.dtype(np.int32).itemsize
    differing = np.frombuffer(key, np.int32, length) != np.frombuffer(other, np.int32, length)
    return int(differing.argmax()) if differing.any() else length
