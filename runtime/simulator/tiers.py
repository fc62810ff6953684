"""Two tiers of experts without their bytes: the tracker, the policy and the slots of the runtime, asked as it asks.

VRAM takes an expert when the policy promotes it and its copy has landed; RAM takes every expert that is read. Copies go
one after another, and no more than RING are on their way: what is worth a copy then is asked for again at its next use.
"""

from collections import deque
from typing import NamedTuple

from mosaic.runtime.experts.placement import Placement, PlacementPolicy
from mosaic.runtime.experts.replay import fetch
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import TraceHeader
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.simulator.costs import Call

WINDOW = 32  # tokens
RING = 4  # buffers for copies to VRAM


class Copy(NamedTuple):
    """On its way into a slot of VRAM."""

    key: int
    slot: int
    lands: float  # seconds


class Tiers:
    """`copy`: seconds of one copy over PCIe; `saving`: of computing an expert in VRAM rather than in RAM.

    Without `vram_slots` there is one tier, RAM.
    """

    def __init__(self, header: TraceHeader, vram_slots: int, ram_slots: int, copy: float, saving: float) -> None:
        def slots(count: int) -> SlotPolicy:
            return SlotPolicy(count, header.layers, header.num_experts, header.top_k)

        self._ram = slots(ram_slots)
        self._vram = slots(vram_slots) if vram_slots else None
        self._tracker = Tracker(WINDOW)
        self._policy = PlacementPolicy(self._tracker, round(copy * 1e9), round(saving * 1e9)) if vram_slots else None
        self._copy = copy
        self._copies: deque[Copy] = deque()

    def call(self, keys: list[int], now: float) -> Call:
        """Ask for the experts of a layer for a token; `now`: seconds, never less than in the call before."""
        self._tracker.observe(keys)
        if not self._vram or not self._policy:
            return Call(0, len(keys), len(fetch(self._ram, keys)), 0)
        self._land(self._vram, now)
        on_their_way = {copy.key for copy in self._copies}
        vram = self._vram
        placed = self._policy.place(keys, lambda key: vram.find(key) is not None and key not in on_their_way)
        for key in keys:
            vram.use(key)
        for key in placed.gpu:
            self._ram.use(key)  # as CachedExperts.observe does; `fetch` does it for the others
        missing = fetch(self._ram, placed.cpu)
        return Call(len(placed.gpu), len(placed.cpu), len(missing), self._promote(vram, placed, now))

    def tick(self) -> None:
        """A token is done."""
        self._tracker.tick()
        self._ram.tick()
        if self._vram:
            self._vram.tick()

    def _promote(self, vram: SlotPolicy, placed: Placement, now: float) -> int:
        """Begin copies; none takes the slot of an expert that computes now."""
        computing = [slot for key in placed.gpu if (slot := vram.find(key)) is not None]
        for slot in computing:
            vram.pin(slot)
        begun = 0
        for key in placed.promote:
            if len(self._copies) == RING:
                break
            if vram.find(key) is not None:  # on its way
                continue
            claim = vram.claim(key)
            if claim is None:
                break
            begins = max([now, *(copy.lands for copy in self._copies)])
            self._copies.append(Copy(key, claim.slot, begins + self._copy))
            begun += 1
        for slot in computing:
            vram.unpin(slot)
        return begun

    def _land(self, vram: SlotPolicy, now: float) -> None:
        while self._copies and self._copies[0].lands <= now:
            vram.unpin(self._copies.popleft().slot)
