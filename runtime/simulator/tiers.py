"""Two tiers of experts without their bytes: the tracker, the policy and the slots of the runtime, asked as it asks.

VRAM has an expert when the policy promoted it and its copy has landed; RAM takes every expert that is read. Copies go
one after another.
"""

from collections import deque

from mosaic.runtime.experts.placement import WINDOW, Placement, PlacementPolicy
from mosaic.runtime.experts.promotion import RING, Promotion
from mosaic.runtime.experts.replay import fetch
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import TraceHeader
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.simulator.costs import Call


class Vram:
    """Slots, and the copies on their way there, which take `copy` seconds each."""

    def __init__(self, slots: SlotPolicy, policy: PlacementPolicy, copy: float) -> None:
        self._promotion = Promotion(slots, policy, RING)
        self._copy = copy
        self._lands: deque[float] = deque()  # seconds: when each of the copies on their way lands

    def place(self, keys: list[int], now: float) -> Placement:
        """Where the experts of a layer are computed, when the copies that arrived until now have landed."""
        while self._lands and self._lands[0] <= now:
            self._lands.popleft()
            self._promotion.land(self._promotion.flying[0])
        return self._promotion.place(keys)

    def promote(self, placement: Placement, now: float) -> int:
        """Begin copies, and how many."""
        begun = len(self._promotion.begin(placement))
        for _ in range(begun):
            begins = max(now, self._lands[-1]) if self._lands else now
            self._lands.append(begins + self._copy)
        return begun

    def tick(self) -> None:
        """A token is done."""
        self._promotion.tick()


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
            return Call(0, len(keys), self._read(keys), 0)
        placement = self._vram.place(keys, now)
        missing = self._read(placement.cpu)
        return Call(len(placement.gpu), len(placement.cpu), missing, self._vram.promote(placement, now))

    def tick(self) -> None:
        """A token is done."""
        self._tracker.tick()
        for tier in (self._ram, self._vram):
            if tier:
                tier.tick()

    def _read(self, cold: list[int]) -> int:
        """Experts that RAM has to read; as in the runtime's store, uses of what VRAM has do not count there."""
        return len(fetch(self._ram, cold)) if self._ram else 0
