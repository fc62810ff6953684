"""What of a model lies on a device, before its memory is taken. What stays in RAM is planned in `plan`.

Figures are bytes of the device's memory; `vram_items` knows what takes how many.
"""

from dataclasses import dataclass

from mosaic.format.errors import InputError
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.sizes import ARENA, format_size
from mosaic.runtime.vram_items import Kind, VramItems
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes, Wishes

PIECES = (2048, 1024, 512, 256)  # tokens of a prompt that are computed together
PIECE_SHARE = 8  # of a budget, at most one part in so many for a prompt in work, unless its pieces are the shortest


@dataclass(frozen=True)
class VramPlan:
    """What lies on the device: `slots` for experts of one `kind`, the dense part of so many first `layers`, the `head`.

    `stream`: slots of the streaming buffer, half of them in either half. `piece`: tokens of a prompt that are computed
    together. `context`: tokens of a sequence.
    """

    budget: int
    context: int
    slots: int
    layers: int
    head: bool
    stream: int
    piece: int
    kind: Kind | None
    items: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of the items."""
        return sum(self.items.values())


def make_vram_plan(weights: Weights, places: ExpertPlaces, wishes: Wishes, vram: VramWishes, budget: int) -> VramPlan:
    """The plan of a run on a device that has so much memory to give, for the context that `wishes` say.

    First comes what any run needs, then what was asked for, then, as far as nothing was: expert slots up to ARENA,
    dense layers with what they remember, the head, more slots. InputError if what was asked for does not fit, or if
    nothing does.
    """
    draft = _Draft(VramItems(weights, places, wishes), vram, budget)
    pieces = [piece for piece in PIECES if draft.in_proportion(piece)] if vram.piece is None else [vram.piece]
    for piece in pieces:
        if plan := draft.filled(piece):
            return plan
    raise draft.refused()


class _Draft:
    """A choice of what is on a device, and the items that it takes."""

    def __init__(self, items: VramItems, vram: VramWishes, budget: int) -> None:
        self._items = items
        self._budget = budget
        self._all = len(items.spec.layers)
        self._layers = None if vram.layers is None else min(vram.layers, self._all)
        self._slots = None if vram.slots_nbytes is None else self._slots_of(vram.slots_nbytes)

    def _slots_of(self, nbytes: int) -> int:
        """As many as were asked for."""
        items = self._items
        count = min(nbytes // items.slot, items.most) if items.slot else 0
        if nbytes and not items.least <= count > 0:
            least = f"at least {_exact(items.least * items.slot)}: two layers' experts of a token"
            raise InputError(
                "--vram is of no use",
                found=_exact(nbytes),
                expected=least if items.slot else "a model with experts in E4M3: others are computed by the CPU",
                remedy="choose another size, or leave it out",
            )
        return count

    def _plan(self, slots: int, layers: int, head: bool, piece: int) -> VramPlan:
        items = self._items
        taken = items.of(slots, layers, head, piece)
        return VramPlan(self._budget, items.context, slots, layers, head, items.stream, piece, items.kind, taken)

    def _fits(self, slots: int, layers: int, head: bool, piece: int) -> bool:
        return self._plan(slots, layers, head, piece).total <= self._budget

    def _most_slots(self, layers: int, head: bool, piece: int, most: int) -> int:
        """So many as fit, at most `most`; none if too few do to be of use."""
        if not self._items.slot:
            return 0
        count = min((self._budget - self._plan(0, layers, head, piece).total) // self._items.slot, most)
        return count if count >= self._items.least else 0

    def in_proportion(self, piece: int) -> bool:
        """Whether a prompt in such pieces leaves enough for what is of use all the time."""
        return piece == PIECES[-1] or self._items.scratch(self._all, piece) <= self._budget // PIECE_SHARE

    def filled(self, piece: int) -> VramPlan | None:
        """The budget given away, in order; None if what was asked for does not fit, or nothing does."""
        slots, layers, items = self._slots or 0, self._layers or 0, self._items
        if not self._fits(slots, layers, False, piece):
            return None
        if self._slots is None and items.slot:
            slots = self._most_slots(layers, False, piece, min(ARENA // items.slot, items.most))
        if self._layers is None:
            while layers < self._all and self._fits(slots, layers + 1, False, piece):
                layers += 1
        head = layers == self._all and self._fits(slots, layers, True, piece)
        if self._slots is None:
            slots = self._most_slots(layers, head, piece, items.most)
        return self._plan(slots, layers, head, piece) if slots or layers else None

    def refused(self) -> InputError:
        """Why there is no plan, and what it would take."""
        slots, layers, piece = self._slots or 0, self._layers or 0, PIECES[-1]
        if slots or layers:
            asked = self._plan(slots, layers, False, piece)
            parts = [f"{slots:,} expert slots take {_exact(asked.items['expert slots'])}"] if slots else []
            parts += [f"{layers} layers {_exact(asked.items['dense weights'])}"] if layers else []
            return InputError(
                "the memory of the device does not hold what was asked for",
                found=_exact(self._budget),
                expected=f"at least {_exact(asked.total)}, of which {' and '.join(parts)}",
                remedy="ask for less with --vram or --gpu-layers, shorten --context, or choose --device cpu",
            )
        of_use = [self._plan(self._items.least, 0, False, piece)] if self._slots is None and self._items.slot else []
        of_use += [self._plan(0, 1, False, piece)] if self._layers is None else []
        return InputError(
            "nothing of this model can be on the device",
            found=_exact(self._budget) if of_use else "no expert slots and no layers",
            expected=f"at least {_exact(min(plan.total for plan in of_use))}" if of_use else "one of them",
            remedy="choose --device cpu",
        )


def _exact(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({format_size(nbytes)})"
