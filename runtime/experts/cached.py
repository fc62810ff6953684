"""Experts from a bounded arena: right when memory cannot hold the model.

What is missing is read while the rest computes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mosaic.runtime.experts.arena import Arena, Key
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.slots import HALF_LIFE
from mosaic.runtime.weights import Expert

MOST_OF_A_LAYER = 0.5  # a prompt that uses so much of one layer will use as much of the next


@dataclass
class Traffic:
    """What happened so far. Every expert of a layer call is a hit or a miss once, for however many tokens."""

    hits: int = 0  # in memory
    misses: int = 0
    stall_seconds: float = 0.0  # waiting for the disk with nothing to compute
    ahead: int = 0  # experts read before the router chose, and
    ahead_used: int = 0  # of these, chosen
    foretold: int = 0  # experts chosen where a choice had been foretold, and
    foretold_right: int = 0  # of these, foretold


class CachedExperts:
    """See `ExpertStore`."""

    def __init__(self, places: ExpertPlaces, arena: Arena) -> None:
        self.traffic = Traffic()
        self._places = places
        self._arena = arena
        self._ahead: set[Key] = set()  # read ahead, and neither chosen nor given up yet
        self._foretold: dict[int, set[int]] = {}  # by layer

    def observe(self, layer: int, chosen: NDArray[np.int64]) -> None:
        """See ExpertStore. Of a prompt the last tokens count: a long one would outweigh every answer."""
        if layer == self._places.layers[0]:
            self._arena.policy.tick()
        for expert in chosen[-HALF_LIFE:].ravel().tolist():
            self._arena.policy.use(self._arena.number((layer, expert)))

    def nbytes(self, layer: int, expert: int) -> int:
        """See ExpertStore."""
        return self._places[layer, expert].nbytes

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertStore. Read only as far as nothing else is to be read."""
        self._foretold[layer] = set(experts)
        for expert in experts:
            if not self._arena.idle or not self._read_ahead((layer, expert), streaming=False):
                break

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertStore. Groups are what arrived while the group before was computed with."""
        arena, keys = self._arena, [(layer, expert) for expert in experts]
        arena.check_file(keys[0])
        self._settle(keys)
        held = [key for key in keys if arena.has(key)]
        coming = [key for key in arena.flying if key in keys]
        missing = [key for key in keys if key not in held and key not in coming]
        self._count(keys, len(keys) - len(held))
        for key in held:
            arena.hold(key)
        try:
            self._begin(coming, tokens)
            missing = self._begin(missing, tokens)
            yield {key[1]: arena.expert(key) for key in held}
            while True:
                while held:
                    arena.let_go(held.pop())
                missing = self._begin(missing, tokens)
                coming = [key for key in arena.flying if key in keys]
                if not coming and not missing:
                    break
                start = perf_counter()
                if coming:
                    held += arena.land(coming, wait=True)
                else:  # every slot is being read into for something else
                    self._let_land(arena.flying, wait=True)
                self.traffic.stall_seconds += perf_counter() - start
                yield {key[1]: arena.expert(key) for key in held}
        finally:
            for key in held:
                arena.let_go(key)
        if tokens > 1 and len(keys) > MOST_OF_A_LAYER * self._places.num_experts:
            self._read_next_layer(layer)

    def close(self) -> None:
        """End all reads."""
        self._arena.close()

    def _begin(self, keys: list[Key], tokens: int) -> list[Key]:
        """Begin to read as many as there are slots for; the others."""
        for place, key in enumerate(keys):
            if not self._arena.begin(key, streaming=tokens > 1):
                return keys[place:]
        return []

    def _read_ahead(self, key: Key, *, streaming: bool) -> bool:
        """Begin to read an expert that may be needed; False if there is no slot."""
        if self._arena.has(key) or key in self._arena.flying:
            return True
        begun = self._arena.begin(key, streaming=streaming, speculative=True)
        if begun:
            self._ahead.add(key)
            self.traffic.ahead += 1
        return begun

    def _read_next_layer(self, layer: int) -> None:
        """While the mixer of the next layer computes, read the experts that a long prompt will need there."""
        following = [other for other in self._places.layers if other > layer][:1]
        for key in ((other, expert) for other in following for expert in range(self._places.num_experts)):
            if not self._read_ahead(key, streaming=True):
                break

    def _settle(self, keys: Collection[Key]) -> None:
        """The router chose: give up what was read ahead for this layer in vain, let go of what landed meanwhile."""
        layer = next(iter(keys))[0]
        for key in [key for key in self._ahead if key[0] == layer and key not in keys]:
            self._ahead.remove(key)
            if key in self._arena.flying:
                self._arena.cancel(key)
        self._let_land([key for key in self._arena.flying if key not in keys], wait=False)

    def _let_land(self, keys: Collection[Key], *, wait: bool) -> None:
        for key in self._arena.land(keys, wait=wait):
            self._arena.let_go(key)

    def _count(self, keys: list[Key], missing: int) -> None:
        traffic, layer = self.traffic, keys[0][0]
        traffic.hits += len(keys) - missing
        traffic.misses += missing
        used = self._ahead.intersection(keys)
        traffic.ahead_used += len(used)
        self._ahead -= used
        if layer in self._foretold:
            traffic.foretold += len(keys)
            traffic.foretold_right += len(self._foretold.pop(layer).intersection(expert for _, expert in keys))
