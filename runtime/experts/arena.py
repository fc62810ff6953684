"""A bounded arena of memory for experts, and the reads on their way into it.

Moves bytes. Which slot an expert gets, and which one goes for it, is `SlotPolicy`'s to decide; when to read is the
caller's. A slot is pinned from the beginning of its read until it is let go, and while someone holds it.
"""

import weakref
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mosaic import _native
from mosaic.format.direct import aligned, aligned_size
from mosaic.format.errors import InputError
from mosaic.runtime.experts.places import ExpertPlaces, check_sum
from mosaic.runtime.experts.scales import ResidentScales
from mosaic.runtime.experts.shards import ShardFiles
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.machine import READ_DEPTH
from mosaic.runtime.weights import Expert

Key = tuple[int, int]  # layer, expert


class Arena:
    """So many slots, each for one expert of any layer.

    `check`: compare an expert's checksum with the index when it is read for the first time.
    """

    def __init__(self, places: ExpertPlaces, folder: Path, num_slots: int, *, check: bool = False) -> None:
        self._places = places
        self._num_slots = num_slots
        self._files = ShardFiles(folder)
        self._scales = ResidentScales(places, self._files)
        span = slot_nbytes(places)
        self._memory = _memory(num_slots * span).reshape(num_slots, span)
        self._multipliers = np.zeros((num_slots, self._scales.most), np.uint8)
        self._views: dict[tuple[int, tuple[str, str]], Expert] = {}  # of a slot, by kind of expert
        self._unchecked = set(places) if check else set()
        self._nbytes, self._seconds = 0, 0.0  # read by earlier readers
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.policy = SlotPolicy(self._num_slots, self._places.layers, self._places.num_experts, self._places.top_k)
        self._tickets: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # by ticket
        self._reader = _reader()
        self.close = weakref.finalize(self, _close, self._reader, self._files)

    def reset(self) -> None:
        """Forget every expert and every read: for when nobody knows any more what is where."""
        self.close.detach()
        self._reader.close()  # no slot is written to from here on
        self._nbytes, self._seconds = self.nbytes_read, self.read_seconds
        self._begin_anew()

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        return self._nbytes + self._reader.nbytes

    @property
    def read_seconds(self) -> float:
        """How long reads were on their way so far."""
        return self._seconds + self._reader.busy_seconds

    @property
    def idle(self) -> bool:
        """Whether a read that is begun now begins at once."""
        return self._reader.idle > 0

    @property
    def flying(self) -> list[Key]:
        """What is being read."""
        return list(self._tickets)

    def has(self, key: Key) -> bool:
        """Whether an expert can be used at once."""
        return key not in self._tickets and self.policy.find(self.number(key)) is not None

    def begin(self, key: Key, *, streaming: bool = False, speculative: bool = False) -> bool:
        """Begin to read an expert that is not there; False if no slot is free. One on its way counts as needed."""
        if key in self._tickets:
            self._reader.need(self._tickets[key])
            return True
        claim = self.policy.claim(self.number(key), streaming)
        if claim is None:
            return False
        place, slot = self._places[key], claim.slot
        scales = self._scales[key]
        self._multipliers[slot, : len(scales)] = scales
        descriptor, memory = self._files.descriptor(place.shard), self._memory[slot, : place.span_nbytes]
        ticket = self._reader.submit(descriptor, place.offset, memory, speculative)
        self._tickets[key], self._keys[ticket] = ticket, key
        return True

    def land(self, keys: Collection[Key], *, wait: bool) -> list[Key]:
        """Those of the reads that are done, at least one if it waits. Their slots stay pinned until they are let go.

        InputError if a read failed, or its file was written to meanwhile.
        """
        tickets = [self._tickets[key] for key in keys]
        if not tickets:
            return []
        try:
            done = self._reader.wait(tickets) if wait else self._reader.done(tickets)
        except OSError as error:
            key = self._forget(error.ticket)  # type: ignore[attr-defined]  # see Reader.wait
            self.policy.forget(self.number(key))
            raise self._files.failed(self._places[key].shard, error) from error
        landed = [self._forget(ticket) for ticket in done]
        try:
            self._check(landed)
        except InputError:
            for key in landed:
                self.policy.forget(self.number(key))  # nobody must take them for good
            raise
        return landed

    def cancel(self, key: Key) -> None:
        """Do not read an expert after all, if that has not begun."""
        if self._reader.cancel(self._tickets[key]):
            self._forget(self._tickets[key])
            self.policy.forget(self.number(key))

    def hold(self, key: Key) -> None:
        """Keep an expert that is there until it is let go."""
        slot = self.policy.find(self.number(key))
        assert slot is not None
        self.policy.pin(slot)

    def let_go(self, key: Key) -> None:
        """The counterpart of `hold` and `begin`."""
        slot = self.policy.find(self.number(key))
        assert slot is not None
        self.policy.unpin(slot)

    def expert(self, key: Key) -> Expert:
        """An expert that is held."""
        slot, place = self.policy.find(self.number(key)), self._places[key]
        assert slot is not None
        if (slot, place.kind) not in self._views:
            buffers = self._memory[slot], self._multipliers[slot]
            self._views[slot, place.kind] = self._places.expert_at(place, buffers[0], 0, buffers[1], 0)
        return self._views[slot, place.kind]

    def span(self, key: Key) -> NDArray[np.uint8]:
        """The span of an expert that is there, as it lies in its shard."""
        slot = self.policy.find(self.number(key))
        assert slot is not None
        return self._memory[slot, : self._places[key].span_nbytes]

    def scales(self, key: Key) -> NDArray[np.uint8]:
        """The scales of any expert, as they lie in its shard."""
        return self._scales[key]

    def number(self, key: Key) -> int:
        """An expert as SlotPolicy knows it."""
        return key[0] * self._places.num_experts + key[1]

    def _forget(self, ticket: int) -> Key:
        key = self._keys.pop(ticket)
        del self._tickets[key]
        return key

    def _check(self, landed: list[Key]) -> None:
        """InputError if what was read may not be what the model is made of."""
        for shard in {self._places[key].shard for key in landed}:
            self._files.check(shard)
        for key in self._unchecked.intersection(landed):
            place = self._places[key]
            check_sum(place, self._files.file(place.shard), self.span(key).data, self._scales[key].data)
            self._unchecked.remove(key)


def _memory(nbytes: int) -> NDArray[np.uint8]:
    try:
        return aligned(nbytes)[:nbytes]
    except (OSError, MemoryError) as error:
        remedy = "give less with --ram"
        raise InputError(
            "no memory for expert slots", found=error, expected=f"{nbytes:,} bytes", remedy=remedy
        ) from error


def _reader() -> _native.Reader:
    try:
        return _native.Reader(READ_DEPTH)
    except RuntimeError as error:
        remedy = "raise the limit of processes (ulimit -u)"
        raise InputError(
            "no threads to read with", found=error, expected=f"{READ_DEPTH} more", remedy=remedy
        ) from error


def _close(reader: _native.Reader, files: ShardFiles) -> None:
    """End all reads, then close the files: another file might get the descriptor."""
    reader.close()
    files.close()


def slot_nbytes(places: ExpertPlaces) -> int:
    """Bytes of a slot: the largest span, in whole pages."""
    return max((aligned_size(places[key].span_nbytes) for key in places), default=0)
