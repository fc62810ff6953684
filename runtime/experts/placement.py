"""Which experts of a layer call are computed where, and which are worth a copy into the next, faster tier.

A decision in integers: what is in the tier, and what goes when it is full, its slots know (`slots`).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mosaic.runtime.experts.tracker import Tracker

MIN_HITS = 3  # uses within the tracker's window
WINDOW = 32  # tokens that the tracker should remember; 64 and 128 bring no more tokens per second (docs/LOG.md)


class Placement(NamedTuple):
    """Keys of one layer call: computed in the faster tier, computed here, and of the latter those worth a copy."""

    gpu: list[int]
    cpu: list[int]
    promote: list[int]  # the most used first


class PlacementPolicy:
    """Promotes what was used `min_hits` times and pays, if the coming window brings as many uses as the last.

    What would lose its slot for it loses its uses there: they count against the copy (`pays`). Without that, experts
    that are about as hot as each other take their slots in turn.

    `copy_cost` of one expert and the `saving` of one use in the faster tier: in the same unit, nanoseconds say.
    """

    def __init__(self, tracker: Tracker, copy_cost: int, saving: int, min_hits: int = MIN_HITS) -> None:
        if saving < 1:
            raise ValueError(f"a tier that saves {saving} per use")
        self._tracker = tracker
        self._threshold = max(min_hits, copy_cost // saving + 1)

    def place(self, keys: Iterable[int], resident: Callable[[int], bool]) -> Placement:
        """Place the experts of a layer call, which the tracker has observed; `resident`: is a key in the tier.

        Those to promote are worth a copy into a free slot; before one takes another's, ask `pays`.
        """
        placement = Placement([], [], [])
        for key in keys:
            (placement.gpu if resident(key) else placement.cpu).append(key)
        worth = [key for key in placement.cpu if self.pays(key, None)]
        placement.promote.extend(sorted(worth, key=self._tracker.uses, reverse=True))
        return placement

    def pays(self, key: int, evicted: int | None) -> bool:
        """Is a key worth a copy that evicts another, or none (`SlotPolicy.evicts`)."""
        lost = 0 if evicted is None else self._tracker.uses(evicted)
        return self._tracker.uses(key) - lost >= self._threshold
