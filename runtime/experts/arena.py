"""A bounded arena of memory for experts, and the reads on their way into it.

Moves bytes. Which slot an expert gets, and which one goes for it, is `SlotPolicy`'s to decide; when to read is the
caller's. A slot is pinned from the beginning of its read until it is let go, and while someone holds it.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from mosaic import _native
from mosaic.format.direct import aligned, aligned_size
from mosaic.format.errors import InputError
from mosaic.format.index import crc32c
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.scales import ResidentScales
from mosaic.runtime.experts.shards import ShardFiles
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.weights import Expert

DEPTH = 16  # reads on their way at a time

Key = tuple[int, int]  # layer, expert


class Arena:
    """So many slots, each for one expert of any layer.

    `check`: compare an expert's checksum with the index when it is read for the first time.
    """

    def __init__(self, places: ExpertPlaces, folder: Path, num_slots: int, *, check: bool = False) -> None:
        self.policy = SlotPolicy(num_slots, places.layers, places.num_experts, places.top_k)
        self._places = places
        self._files = ShardFiles(folder)
        self._scales = ResidentScales(places, self._files)
        span = slot_nbytes(places)
        self._memory = aligned(num_slots * span)[: num_slots * span].reshape(num_slots, span)
        self._multipliers = np.zeros((num_slots, self._scales.most), np.uint8)
        self._views: dict[tuple[int, tuple[str, str]], Expert] = {}  # of a slot, by kind of expert
        self._unchecked = set(places) if check else set()
        self._reader = _native.Reader(DEPTH)
        self._tickets: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # by ticket

    @property
    def nbytes_read(self) -> int:
        """Bytes read so far."""
        return self._reader.nbytes

    @property
    def read_seconds(self) -> float:
        """How long reads were on their way so far."""
        return self._reader.busy_seconds

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
        """Those of the reads that are done, at least one if it waits. Their slots stay pinned until they are let go."""
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
        for key in landed:
            if key in self._unchecked:
                self._check(key)
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

    def check_file(self, key: Key) -> None:
        """InputError if the shard of an expert, once read from, was written to."""
        self._files.check(self._places[key].shard)

    def number(self, key: Key) -> int:
        """An expert as SlotPolicy knows it."""
        return key[0] * self._places.num_experts + key[1]

    def close(self) -> None:
        """End all reads and close the files."""
        self._reader.close()
        self._files.close()

    def _forget(self, ticket: int) -> Key:
        key = self._keys.pop(ticket)
        del self._tickets[key]
        return key

    def _check(self, key: Key) -> None:
        slot, place = self.policy.find(self.number(key)), self._places[key]
        found = crc32c(self._scales[key].data, crc32c(self._memory[slot, : place.span_nbytes].data))
        if found != place.crc32c:
            self.policy.forget(self.number(key))
            raise InputError(
                f"expert {key[1]} of layer {key[0]} is damaged",
                file=self._files.file(place.shard),
                found=f"CRC32C {found:08x}",
                expected=f"{place.crc32c:08x}, as in the expert index",
                remedy="copy the model directory again, or convert the checkpoint again; mosaic-verify tells more",
            )
        self._unchecked.remove(key)


def slot_nbytes(places: ExpertPlaces) -> int:
    """Bytes of a slot: the largest span, in whole pages."""
    return max((aligned_size(places[key].span_nbytes) for key in places), default=0)
