"""Which copies of experts into a faster tier begin, and which of them are there: tracker, policy and slots in one.

A decision in integers: it moves no byte and knows no time. Whoever moves bytes says when a copy has landed. The slot of
a copy is pinned until then, and its expert is computed elsewhere.
"""

from typing import NamedTuple

from mosaic.runtime.experts.placement import Placement, PlacementPolicy
from mosaic.runtime.experts.slots import SlotPolicy

RING = 4  # buffers for copies on their way


class Copy(NamedTuple):
    """An expert on its way into a slot."""

    key: int
    slot: int


class Promotion:
    """`most` copies are on their way at a time: what else is worth one is asked for again at its next use."""

    def __init__(self, slots: SlotPolicy, policy: PlacementPolicy, most: int) -> None:
        self._slots = slots
        self._policy = policy
        self._most = most
        self.flying: list[Copy] = []  # in the order in which they began

    def place(self, keys: list[int]) -> Placement:
        """Where the experts of a layer call are computed, which the tracker has observed: each once.

        A key counts as one use each time it is named: of a step of several sequences, once for each that uses it.
        """
        for key in keys:
            self._slots.use(key)
        return self._policy.place(dict.fromkeys(keys), self.resident)

    def begin(self, placement: Placement) -> list[Copy]:
        """The copies to begin now; none takes the slot of an expert that computed there in the call that was placed."""
        computing = list[int]()
        for key in placement.gpu:
            slot = self.slot(key)
            assert slot is not None, "placed before something else began"
            self._slots.pin(slot)
            computing.append(slot)
        begun = [copy for key in placement.promote if (copy := self._begin(key))]
        for slot in computing:
            self._slots.unpin(slot)
        return begun

    def land(self, copy: Copy) -> None:
        """Its bytes are there."""
        self.flying.remove(copy)
        self._slots.unpin(copy.slot)

    def drop(self, copy: Copy) -> None:
        """Its bytes did not come, and nothing writes to its slot any more."""
        self.flying.remove(copy)
        self._slots.forget(copy.key)

    def slot(self, key: int) -> int | None:
        """Where a key computes in the faster tier; None if it does not: it is not there, or on its way."""
        slot = self._slots.find(key)
        return None if self.flying and any(copy.key == key for copy in self.flying) else slot

    def resident(self, key: int) -> bool:
        """Whether a key computes there."""
        return self.slot(key) is not None

    def tick(self) -> None:
        """See SlotPolicy."""
        self._slots.tick()

    def _begin(self, key: int) -> Copy | None:
        if len(self.flying) == self._most or self._slots.find(key) is not None:
            return None
        if not self._policy.pays(key, self._slots.evicts(key)) or (claim := self._slots.claim(key)) is None:
            return None
        copy = Copy(key, claim.slot)
        self.flying.append(copy)
        return copy
