"""The experts that lie in slots on a device: which ones, by whom they are used, and the copies on their way there."""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mosaic.runtime.device import Device
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.experts.placement import MIN_HITS, WINDOW, Placement, PlacementPolicy
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING, Copy, Promotion
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.store import ExpertStore, Loan
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.experts.uploads import Upload, Uploads

NOWHERE = -1  # in place of a slot


@dataclass(frozen=True)
class Costs:
    """Nanoseconds: to copy one expert to the device, and what is saved each time it is computed there.

    `min_hits`: see PlacementPolicy.
    """

    copy: int
    saving: int
    min_hits: int = MIN_HITS


class LayerThere(Container[int]):
    """The experts of a layer that are in slots at the moment, by their numbers. Whoever has it holds no device."""

    def __init__(self, promotion: Promotion, first: int) -> None:
        self._promotion = promotion
        self._first = first  # key

    def __contains__(self, expert: object) -> bool:
        assert isinstance(expert, int)
        return self._promotion.resident(self._first + expert)


class HotExperts:
    """Which experts are in `held`. Between two calls it is sound; after an interruption a new one begins cold."""

    def __init__(self, device: Device, uploads: Uploads, places: ExpertPlaces, held: ExpertSlots, costs: Costs) -> None:
        self.held = held
        self.nbytes = 0  # copied so far
        self._device, self._uploads, self._places = device, uploads, places
        self._tracker = Tracker(WINDOW)
        slots = SlotPolicy(len(held.codes), places.layers, places.num_experts, places.top_k)
        policy = PlacementPolicy(self._tracker, costs.copy, costs.saving, costs.min_hits)
        self._promotion = Promotion(slots, policy, min(RING, places.top_k))
        self._sent: dict[Copy, tuple[Upload, Loan]] = {}

    def place(self, layer: int, routed: NDArray[np.int64]) -> Placement:
        """Where the experts of a layer call are computed, those of routed [.., K]; all that has arrived is there.

        Of a prompt the last tokens count: a long one would outweigh every answer.
        """
        if layer == self._places.layers[0]:
            self._tracker.tick()
            self._promotion.tick()
        self._land()
        keys = routed + layer * self._places.num_experts
        recent = keys[..., -WINDOW:, :].ravel().tolist()
        self._tracker.observe(recent)
        return self._promotion.place([*recent, *set(keys[..., :-WINDOW, :].ravel().tolist())])

    def there(self, layer: int) -> LayerThere:
        """What is in slots of a layer."""
        return LayerThere(self._promotion, layer * self._places.num_experts)

    def slots(self, placement: Placement) -> NDArray[np.int32]:
        """By the number of an expert of that layer, its slot; one more for the shared expert, which has none."""
        slots = np.full(self._places.num_experts + 1, NOWHERE, np.int32)
        for key in placement.gpu:
            slots[key % self._places.num_experts] = self._promotion.slot(key)
        return slots

    def promote(self, placement: Placement, store: ExpertStore) -> None:
        """Begin to copy what is worth it, after all that was begun on the device."""
        loans = {key: loan for key in placement.promote if (loan := self._lent(key, store)) is not None}
        placement.promote[:] = loans
        for copy in self._promotion.begin(placement):
            loan = loans.pop(copy.key)
            target = self.held.codes[copy.slot], self.held.scales[copy.slot]
            upload = self._uploads.send((loan.span, loan.scales), target, self._device.fence())
            self._sent[copy] = upload, loan
        for loan in loans.values():
            loan.give_back()

    def _lent(self, key: int, store: ExpertStore) -> Loan | None:
        """An expert that could be copied: it is of the right kind, and in memory."""
        return store.lend(*self._split(key)) if self.fits(*self._split(key)) else None

    def fits(self, layer: int, expert: int) -> bool:
        """Whether an expert is of the kind that the slots are for."""
        return self._places[layer, expert].kind == self.held.kind

    def give_back(self) -> None:
        """All that was lent, when nobody reads it any more."""
        for _, loan in self._sent.values():
            loan.give_back()

    def _land(self) -> None:
        for copy, (upload, loan) in list(self._sent.items()):
            if self._uploads.staged(upload):
                loan.give_back()
            if self._uploads.landed(upload):
                del self._sent[copy]
                if loan.sound:
                    self._promotion.land(copy)
                    self.nbytes += self.held.slot_nbytes
                else:  # the store began anew while its bytes were read: they may be another expert's
                    self._promotion.drop(copy)

    def _split(self, key: int) -> tuple[int, int]:
        """Layer and expert."""
        return divmod(key, self._places.num_experts)
