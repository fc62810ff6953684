"""Experts from a bounded arena: right when memory cannot hold the model.

What is missing is read while the rest computes.
"""

import contextlib
import weakref
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.runtime.experts.arena import Arena, Key
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.slots import HALF_LIFE
from mosaic.runtime.experts.store import Loan
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.weights import Expert

MOST_OF_A_LAYER = 0.5  # a prompt that uses so much of one layer will use as much of the next


class CachedExperts:
    """See `ExpertStore`."""

    def __init__(self, places: ExpertPlaces, arena: Arena) -> None:
        self._traffic = Traffic()
        self._places = places
        self._arena = arena
        self._ahead: set[Key] = set()  # read ahead, and neither chosen nor given up yet
        self._foretold: dict[int, list[int]] = {}  # by layer
        self._elsewhere: dict[int, Container[int]] = {}  # by layer: what a faster tier has of it
        self._loans: dict[weakref.ref[Loan], Key] = {}  # whose slots are held
        self._sound = True  # False while arena and policy may disagree
        self._epoch = 0  # how often they did

    @property
    def traffic(self) -> Traffic:
        """See ExpertStore."""
        return replace(self._traffic, disk_bytes=self._arena.nbytes_read, disk_seconds=self._arena.read_seconds)

    def warm(self, keys: Sequence[Key], progress: Progress = silent) -> None:
        """Read experts before anyone asks for them, the most valuable first, as many as there are slots for."""
        self._enter()
        for key in keys:
            if not self._arena.begin(key):
                break
        told = progress("reading experts", sum(self._places[key].nbytes for key in self._arena.flying))
        while self._arena.flying:
            before = self._arena.nbytes_read
            self._let_land(self._arena.flying, wait=True)
            told(self._arena.nbytes_read - before)
        self._sound = True

    def observe(self, layer: int, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """See ExpertStore. Of a prompt the last tokens count: a long one would outweigh every answer.

        Of several sequences all do, and their step is one: each sequence's uses are remembered as long as alone.
        """
        self._enter()
        if layer == self._places.layers[0]:
            self._arena.policy.tick()
        for expert in chosen[..., -HALF_LIFE:, :].ravel().tolist():
            if expert not in elsewhere:
                self._arena.policy.use(self._arena.number((layer, expert)))
        self._elsewhere[layer] = elsewhere
        self._settle(layer, {(layer, expert) for expert in set(chosen.ravel().tolist()) if expert not in elsewhere})
        self._sound = True

    def nbytes(self, layer: int, expert: int) -> int:
        """See ExpertStore."""
        return self._places[layer, expert].nbytes

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertStore. They are read when the experts of the layer that comes first are on their way."""
        self._foretold[layer] = list(experts)

    def lend(self, layer: int, expert: int) -> Loan | None:
        """See ExpertStore. Its slot is held meanwhile, and top_k must be left to serve a layer."""
        if not self._sound:
            return None
        self._enter()
        key, loan = (layer, expert), None
        if len(self._loans) < self._places.top_k and self._arena.has(key):
            self._arena.hold(key)
            loan = Loan(self._arena.span(key), self._arena.scales(key))
            self._loans[weakref.ref(loan)] = key
        self._sound = True
        return loan

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertStore. Groups are what arrived while the group before was computed with."""
        self._enter()
        epoch, held = self._epoch, list[Key]()
        try:
            yield from self._arriving([(layer, expert) for expert in experts], tokens, held)
            if tokens > 1 and len(experts) > MOST_OF_A_LAYER * self._places.num_experts:
                self._read_next_layer(layer)
        except InputError:
            self._give_up()
            self._let_go(held)
            self._sound = True
            raise
        except GeneratorExit:  # between two groups, where all is in order
            if epoch == self._epoch:
                self._let_go(held)
                self._sound = True
            raise
        self._sound = True

    def _arriving(self, keys: list[Key], tokens: int, held: list[Key]) -> Iterator[Mapping[int, Expert]]:
        """The same; `held` are the experts of the last group, to be let go when the next is asked for."""
        arena, wanted = self._arena, set(keys)
        held += [key for key in keys if arena.has(key)]
        coming = [key for key in arena.flying if key in wanted]
        missing = [key for key in keys if key not in {*held, *coming}]
        self._traffic.hits += len(held)
        self._traffic.misses += len(wanted) - len(held)
        for key in held:
            arena.hold(key)
        self._begin(coming, tokens)
        missing = self._begin(missing, tokens)
        self._read_foretold()
        yield {key[1]: arena.expert(key) for key in held}
        while True:
            self._let_go(held)
            missing = self._begin(missing, tokens)
            self._read_foretold()
            coming = [key for key in arena.flying if key in wanted]
            if not coming and not missing:
                break
            start = perf_counter()
            if coming:
                held += arena.land(coming, wait=True)
            else:  # every slot is being read into for something else
                assert arena.flying
                self._let_land(arena.flying, wait=True)
            self._traffic.stall_seconds += perf_counter() - start
            yield {key[1]: arena.expert(key) for key in held}

    def _enter(self) -> None:
        """What an interruption (Ctrl-C) left half done is forgotten with everything else: it starts cold again.

        Between any two instructions a slot may be claimed and not noted, or a read collected and not used.
        """
        if not self._sound:
            for loan in filter(None, (known() for known in self._loans)):
                loan.sound = False
            self._loans.clear()
            self._arena.reset()
            self._ahead.clear()
            self._foretold.clear()
            self._elsewhere.clear()
            self._epoch += 1
        self._sound = False
        for known in list(self._loans):
            if (lent := known()) is None or lent.given_back:
                self._arena.let_go(self._loans.pop(known))

    def _begin(self, keys: list[Key], tokens: int) -> list[Key]:
        """Begin to read as many as there are slots for; the others."""
        for place, key in enumerate(keys):
            if not self._arena.begin(key, streaming=tokens > 1):
                return keys[place:]
        return []

    def _read_foretold(self) -> None:
        """Begin to read what was foretold, as far as nothing else is to be read."""
        for layer, experts in self._foretold.items():
            elsewhere = self._elsewhere.get(layer, ())
            for expert in experts:
                if expert not in elsewhere and not (self._arena.idle and self._read_ahead((layer, expert))):
                    return

    def _read_ahead(self, key: Key) -> bool:
        """Begin to read an expert that may be needed, into a slot of low rank; False if there is none."""
        if self._arena.has(key) or key in self._arena.flying:
            return True
        begun = self._arena.begin(key, streaming=True, speculative=True)
        if begun:
            self._ahead.add(key)
            self._traffic.ahead += 1
        return begun

    def _read_next_layer(self, layer: int) -> None:
        """While the mixer of the next layer computes, read the experts that a long prompt will need there."""
        for following in [other for other in self._places.layers if other > layer][:1]:
            elsewhere = self._elsewhere.get(following, ())
            for expert in range(self._places.num_experts):
                if expert not in elsewhere and not self._read_ahead((following, expert)):
                    return

    def _settle(self, layer: int, keys: set[Key]) -> None:
        """The router chose: give up what was read ahead for this layer in vain, let go of what landed meanwhile."""
        for key in [key for key in self._ahead if key[0] == layer]:
            self._ahead.remove(key)
            if key in keys:
                self._traffic.ahead_used += 1
            elif key in self._arena.flying:
                self._arena.cancel(key)
        if layer in self._foretold:
            self._traffic.foretold += len(keys)
            foretold = ((layer, expert) for expert in self._foretold.pop(layer))
            self._traffic.foretold_right += len(keys.intersection(foretold))
        self._let_land([key for key in self._arena.flying if key not in keys], wait=False)

    def _let_go(self, held: list[Key]) -> None:
        while held:
            self._arena.let_go(held.pop())

    def _give_up(self) -> None:
        """After a read that failed: whoever asks again shall not be told of those that failed with it."""
        for key in self._arena.flying:
            self._arena.cancel(key)
        while self._arena.flying:
            self._let_land(self._arena.flying, wait=True)

    def _let_land(self, keys: Collection[Key], *, wait: bool) -> None:
        """For reads that nobody waits for: of one that failed whoever needs it will be told, after another try."""
        with contextlib.suppress(InputError):
            for key in self._arena.land(keys, wait=wait):
                self._arena.let_go(key)
