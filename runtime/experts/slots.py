"""Which expert is in which slot of a bounded arena, and which one goes when another needs its slot.

A decision in integers: it moves no byte and knows no time. Whoever moves bytes pins a slot while it is filled or read.

The rule. An entry may be evicted if its layer holds more than its *floor*, and by its own layer always. Of those
entries, unless pinned, the one of the lowest *rank* goes: that with the fewest uses, and of equals the one not used for
longest. Uses count for the key, in a slot or not, and are halved every HALF_LIFE tokens.

The layers come in a cycle, so that a common LRU with fewer slots than a token needs loses every expert before its next
use. Counts are the remedy, and the floor helps where slots are scarce. It is top_k, or as many as each layer can have
if 2 * top_k slots are left to all: with fewer pinned than that (two layers of one token) there is always one to be had.

A long prompt reads nearly every expert of a layer, most of which the next token has no use for. Entries claimed for it
(`streaming`) rank below all others until they are used again, the newest lowest: they take each other's slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

HALF_LIFE = 24  # tokens; on all traces tried (tests/bench/routing.py, the demo's) within a point of the best
USE = 1 << 8  # what a use adds to a count, so that it outlasts some halvings
TICK_BITS = 32  # a rank is count << TICK_BITS | tick of the last use; of a streamed entry it is below 0
NEVER = int(np.iinfo(np.int64).max)


class Claim(NamedTuple):
    """A slot for a key, and the key that was evicted from it, if any."""

    slot: int
    evicted: int | None


def floor(num_slots: int, num_layers: int, top_k: int) -> int:
    """How many slots every layer keeps for itself."""
    return min(top_k, (num_slots - 2 * top_k) // num_layers)


class SlotPolicy:
    """Which key is in which of `num_slots` slots. A key is layer * num_experts + expert.

    `layers`: the decoder layers that have experts. ValueError for less than 2 * top_k slots.
    """

    def __init__(self, num_slots: int, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        if num_slots < 2 * top_k:
            raise ValueError(f"{num_slots} slots, of which two layers need {2 * top_k}")
        self._num_experts = num_experts
        self._floor = floor(num_slots, len(layers), top_k)
        self._held: dict[int, set[int]] = {layer: set() for layer in layers}  # slots
        self._slots: dict[int, int] = {}  # by key
        self._keys: list[int] = [-1] * num_slots
        self._pins = [0] * num_slots
        self._free = list(range(num_slots))  # the highest is taken first: of equals it is evicted last
        self._counts: dict[int, int] = {}  # decayed uses by key
        self._ranks = [0] * num_slots
        self._offers = np.full(num_slots, NEVER, np.int64)  # the ranks of what any layer may evict
        self._tick = 0
        self._streamed = 0

    def find(self, key: int) -> int | None:
        """The slot of a key."""
        return self._slots.get(key)

    def use(self, key: int) -> None:
        """Count one use by the router, whether or not the key has a slot."""
        self._counts[key] = self._counts.get(key, 0) + USE
        slot = self._slots.get(key)
        if slot is not None:
            self._ranks[slot] = self._rank(key)
            self._offer(slot)

    def claim(self, key: int, streaming: bool = False) -> Claim | None:
        """A slot, pinned once, for a key that has none; None if all that might be evicted are pinned."""
        if key in self._slots:
            raise ValueError(f"key {key} has a slot")
        layer = key // self._num_experts
        evicted = None
        if not self._free:
            slot = self._victim(layer)
            if slot is None:
                return None
            evicted = self._keys[slot]
            self._drop(slot)
        slot = self._free.pop()
        self._slots[key] = slot
        self._keys[slot] = key
        self._pins[slot] = 1
        if streaming:
            self._streamed += 1
        self._ranks[slot] = -self._streamed if streaming else self._rank(key)
        self._hold(layer, slot)
        return Claim(slot, evicted)

    def evicts(self, key: int) -> int | None:
        """The key that `claim` would evict for a key that has no slot; None if it would find a free slot, or none."""
        slot = None if self._free else self._victim(key // self._num_experts)
        return None if slot is None else self._keys[slot]

    def pin(self, slot: int) -> None:
        """Keep a slot's entry until it is unpinned as often."""
        self._pins[slot] += 1
        self._offers[slot] = NEVER

    def unpin(self, slot: int) -> None:
        """Take back one pin."""
        if not self._pins[slot]:
            raise ValueError(f"slot {slot} is not pinned")
        self._pins[slot] -= 1
        self._offer(slot)

    def forget(self, key: int) -> None:
        """Free a key's slot, pinned or not: what should be in it is not, and no one writes it any more."""
        self._drop(self._slots[key])

    def tick(self) -> None:
        """One more token is done, or one of each of several sequences."""
        self._tick += 1
        if self._tick % HALF_LIFE == 0:
            self._counts = {key: count >> 1 for key, count in self._counts.items() if count > 1}
            self._ranks = [rank if rank < 0 else _halved(rank) for rank in self._ranks]
            self._offers = np.where(self._offers == NEVER, NEVER, np.array(self._ranks))

    def _rank(self, key: int) -> int:
        return self._counts.get(key, 0) << TICK_BITS | self._tick

    def _victim(self, layer: int) -> int | None:
        offered = int(self._offers.argmin())
        candidates = [offered] if self._offers[offered] != NEVER else []
        held = self._held[layer]
        if len(held) <= self._floor:
            candidates += [slot for slot in held if not self._pins[slot]]
        return min(candidates, key=lambda slot: (self._ranks[slot], slot), default=None)

    def _hold(self, layer: int, slot: int) -> None:
        held = self._held[layer]
        held.add(slot)
        for other in held if len(held) == self._floor + 1 else (slot,):
            self._offer(other)

    def _drop(self, slot: int) -> None:
        """Free a slot."""
        key = self._keys[slot]
        layer = key // self._num_experts
        del self._slots[key]
        self._keys[slot] = -1
        self._pins[slot] = 0
        self._free.append(slot)
        held = self._held[layer]
        held.remove(slot)
        self._offers[slot] = NEVER
        if len(held) == self._floor:
            for other in held:
                self._offers[other] = NEVER

    def _offer(self, slot: int) -> None:
        layer = self._keys[slot] // self._num_experts
        open_to_all = not self._pins[slot] and len(self._held[layer]) > self._floor
        self._offers[slot] = self._ranks[slot] if open_to_all else NEVER


def _halved(rank: int) -> int:
    """The rank of half the count."""
    return (rank >> TICK_BITS + 1 << TICK_BITS) | (rank & (1 << TICK_BITS) - 1)
