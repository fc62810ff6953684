"""Where the memory of a run goes, before it is taken: what fits a budget, and what has to be read again and again.

All figures are bytes of resident memory of this process at its peak; `ram_items` knows what takes how many. Nothing is
allocated here. What lies on a device is planned in `plan_vram`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mosaic.format.errors import InputError
from mosaic.format.spec import LayerSpec, ModelSpec
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.footprint import kv_nbytes
from mosaic.runtime.machine import free_memory, resident_memory
from mosaic.runtime.plan_vram import VramPlan
from mosaic.runtime.ram_items import RamItems
from mosaic.runtime.sizes import format_size
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import Wishes

HEADROOM = 768 << 20  # left to others when nobody says how much to take,
HEADROOM_SHARE = 8  # but at most one part in so many of what is free
KV_SHARE = 8  # of a budget, at most one part in so many for keys and values, if nobody says how long the context is
SHORTEST = 2048  # tokens of context that are worth a run
KEPT = 16  # recurrent states that are kept for later prompts where memory allows, for each sequence at a time;
LEAST_KEPT = 2  # at least these: where a prompt's last message ends, and where the answer ends
KEPT_SHARE = 32  # of a budget that does not hold all experts, at most one part in so many for more than that


@dataclass(frozen=True)
class MemoryPlan:
    """`slots`: how many experts are in memory at a time; None if everything is mapped and stays there.

    `kept`: bytes for recurrent states that are kept for later prompts.
    """

    budget: int
    context: int
    kept: int
    slots: int | None
    num_experts: int  # in all layers
    items: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of the items."""
        return sum(self.items.values())


def free_budget() -> int:
    """Bytes that a run may take if nobody says how many: what is free here, less some head-room."""
    free = free_memory()
    return free + resident_memory() - min(HEADROOM, free // HEADROOM_SHARE)


def make_plan(weights: Weights, places: ExpertPlaces, wishes: Wishes, vram: VramPlan | None = None) -> MemoryPlan:
    """The plan of a run. Without a budget, it is `free_budget`.

    With `vram`, dense weights, keys and values and states that lie on the device take no memory here. The context is
    that of `vram` then.

    InputError if the budget is below what has to be in memory: dense weights, states, two layers' experts of a token.
    """
    spec = weights.spec
    if wishes.budget is None:
        return make_plan(weights, places, replace(wishes, budget=free_budget()), vram)
    budget = wishes.budget
    if vram:
        wishes = replace(wishes, context=vram.context)
    if wishes.context is None:
        affordable = affordable_context(spec, spec.layers, wishes, budget)
        try:
            return make_plan(weights, places, replace(wishes, context=affordable))
        except InputError:
            return make_plan(weights, places, replace(wishes, context=shortest_context(spec)))
    return _Draft(RamItems(weights, places, wishes, vram), budget).filled()


class _Draft:
    """A choice of what is in memory, within a budget."""

    def __init__(self, items: RamItems, budget: int) -> None:
        self._items = items
        self._budget = budget

    def filled(self) -> MemoryPlan:
        """All experts mapped, if they fit; or else as many slots as do. InputError if too few do."""
        items = self._items
        most, least = items.kept(KEPT), items.kept(LEAST_KEPT)
        for kept in (most, least):
            plan = self._plan(None, kept)
            if plan.total <= self._budget:
                return plan
        if not items.experts:
            raise self._too_little(plan.total)
        if items.are_converted:  # once for each place in memory, so slots cannot be used again
            raise InputError(
                "experts in float16 are only used in memory",
                found=f"{format_size(self._budget)} of memory, {format_size(plan.total)} needed",
                expected="E4M3, BF16 or F32 experts",
                remedy="give more with --ram, or convert the checkpoint again with a recipe that does not keep them",
            )
        kept = min(max(least, self._budget // KEPT_SHARE), most)
        if self._plan(items.least, kept).total > self._budget:
            kept = least
        if (needed := self._plan(items.least, kept).total) > self._budget:
            raise self._too_little(needed)
        return self._plan(self._most_slots(kept), kept)

    def _plan(self, slots: int | None, kept: int) -> MemoryPlan:
        items = self._items
        return MemoryPlan(self._budget, items.context, kept, slots, items.experts, items.of(slots, kept))

    def _most_slots(self, kept: int) -> int:
        """That fit; the share of a layer's experts that computes at once makes it no plain division."""
        low, high = self._items.least, self._items.experts
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._plan(middle, kept).total <= self._budget else (low, middle - 1)
        return low

    def _too_little(self, needed: int) -> InputError:
        tokens, nbytes = self._items.remembered
        return InputError(
            "the memory does not suffice for this model",
            found=format_size(self._budget),
            expected=f"at least {format_size(needed)}, of which {tokens:,} tokens of context take "
            f"{format_size(nbytes)}",
            remedy="give more with --ram, free some, or shorten --context",
        )


def affordable_context(spec: ModelSpec, layers: Sequence[LayerSpec], wishes: Wishes, budget: int) -> int:
    """Tokens of a sequence whose keys and values in these layers take no more of a budget than they should."""
    fitting = budget // KV_SHARE // max(wishes.parallel * kv_nbytes(spec, layers, wishes.kv), 1)
    return min(spec.max_position_embeddings, max(fitting // SHORTEST * SHORTEST, SHORTEST))


def shortest_context(spec: ModelSpec) -> int:
    """Tokens that a run has where memory is short and nobody says how many."""
    return min(SHORTEST, spec.max_position_embeddings)
