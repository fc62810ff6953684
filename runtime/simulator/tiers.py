"""Two tiers of experts without their bytes: the tracker, the policy and the slots of the runtime, asked as it asks.

VRAM has an expert when the policy promoted it and its copy has landed; RAM takes every expert that is read. Copies go
one after another, and no more than RING are on their way: what else is worth one is asked for again at its next use.
"""

from collections import deque
from typing import NamedTuple

from mosaic.runtime.experts.placement import WINDOW, Placement, PlacementPolicy
from mosaic.runtime.experts.replay import fetch
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import TraceHeader
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.simulator.costs import Call

RING = 4  # buffers for copies to VRAM


class Copy(NamedTuple):
    """On its way into a slot of VRAM, which is pinned until it lands."""

    key: int
    slot: int
    lands: float  # seconds


class Vram:
    """Slots, and the copies on their way there, which take `copy` seconds each."""

    def __init__(self, slots: SlotPolicy, policy: PlacementPolicy, copy: float) -> None:
        self.slots = slots
        self._policy = policy
        self._copy = copy
        self._copies: deque[Copy] = deque()

    def place(self, keys: list[int], now: float) -> Placement:
        """Where the experts of a layer are computed, when the copies that arrived until now have landed."""
        while self._copies and self._copies[0].lands <= now:
            self.slots.unpin(self._copies.popleft().slot)
        for key in keys:
            self.slots.use(key)
        return self._policy.place(keys, self._has)

    def promote(self, placement: Placement, now: float) -> int:
        """Begin copies, and how many; none takes the slot of an expert that computes now."""
        computing = [slot for key in placement.gpu if (slot := self.slots.find(key)) is not None]
        for slot in computing:
            self.slots.pin(slot)
        begun = sum(self._begin(key, now) for key in placement.promote)
        for slot in computing:
            self.slots.unpin(slot)
        return begun

    def _has(self, key: int) -> bool:
        return self.slots.find(key) is not None and all(copy.key != key for copy in self._copies)

    def _begin(self, key: int, now: float) -> bool:
        if len(self._copies) == RING or self.slots.find(key) is not None:
            return False
        if not self._policy.pays(key, self.slots.evicts(key)) or (claim := self.slots.claim(key)) is None:
            return False
        begins = max(now, self._copies[-1].lands) if self._copies else now
        self._copies.append(Copy(key, claim.slot, begins + self._copy))
        return True


class Tiers:
    """`copy`: seconds of one copy over PCIe; `saving`: of computing an expert in VRAM rather than in RAM.

    No `vram_slots`: there is no VRAM. RAM that has a slot for every expert has all of them from the start.
    """

    def __init__(self, header: TraceHeader, vram_slots: int, ram_slots: int, copy: float, saving: float) -> None:
        def slots(count: int) -> SlotPolicy:
            return SlotPolicy(count, header.layers, header.num_experts, header.top_k)

        everything = len(header.layers) * header.num_experts
        self._tracker = Tracker(WINDOW)
        self._ram = slots(ram_slots) if ram_slots < everything else None
        self._vram: Vram | None = None
        if vram_slots:
            policy = PlacementPolicy(self._tracker, round(copy * 1e9), round(saving * 1e9))
            self._vram = Vram(slots(vram_slots), policy, copy)

    def call(self, keys: list[int], now: float) -> Call:
        """Ask for the experts of a layer for a token; `now`: seconds, never less than in the call before."""
        self._tracker.observe(keys)
        if not self._vram:
            return Call(0, len(keys), self._read([], keys), 0)
        placement = self._vram.place(keys, now)
        missing = self._read(placement.gpu, placement.cpu)
        return Call(len(placement.gpu), len(placement.cpu), missing, self._vram.promote(placement, now))

    def tick(self) -> None:
        """A token is done."""
        self._tracker.tick()
        for slots in (self._ram, self._vram and self._vram.slots):
            if slots:
                slots.tick()

    def _read(self, hot: list[int], cold: list[int]) -> int:
        """Experts that RAM has to read; as the store of the runtime, it counts the uses of all."""
        if not self._ram:
            return 0
        for key in hot:
            self._ram.use(key)
        return len(fetch(self._ram, cold))
