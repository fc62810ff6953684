"""The experts that lie in slots on a device: which ones, by whom they are used, and the copies on their way there."""

import weakref
from collections.abc import Container, Sequence
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
    """The experts of a layer that are in slots at the moment, by their numbers; none when the slots have begun anew.

    Whoever has it holds nothing else.
    """

    def __init__(self, promotion: Promotion, first: int) -> None:
        self._promotion = weakref.ref(promotion)
        self._first = first  # key

    def __contains__(self, expert: object) -> bool:
        assert isinstance(expert, int)
        promotion = self._promotion()
        return promotion is not None and promotion.resident(self._first + expert)


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

    def slots(self, layer: int, numbers: Sequence[int]) -> dict[int, int]:
        """The slots of those experts of a layer that are in one; all that has arrived is."""
        self._land()
        first = layer * self._places.num_experts
        found = ((number, self._promotion.slot(first + number)) for number in numbers)
        return {number: slot for number, slot in found if slot is not None}

    def there(self, layer: int) -> LayerThere:
        """What is in slots of a layer."""
        return LayerThere(self._promotion, layer * self._places.num_experts)

    def note(self, layer: int, routed: NDArray[np.int64], store: ExpertStore) -> None:
        """A layer call used routed [.., T, K]: begin the copies that this makes worth it.

        Of a prompt the last tokens count: a long one would outweigh every answer. And it brings no copies, since it is
        no measure of what comes after it.
        """
        if layer == self._places.layers[0]:
            self._tracker.tick()
            self._promotion.tick()
        self._land()
        keys = routed + layer * self._places.num_experts
        recent = keys[..., -WINDOW:, :].ravel().tolist()
        self._tracker.observe(recent)
        placement = self._promotion.place([*recent, *set(keys[..., :-WINDOW, :].ravel().tolist())])
        if routed.shape[-2] == 1:
            self.promote(placement, store)

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
