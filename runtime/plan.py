"""Where the memory of a run goes, before it is taken: what fits a budget, and what has to be read again and again.

All figures are bytes of resident memory of this process at its peak. Nothing is allocated here. What lies on a device
is planned in `plan_vram`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.format.spec import LayerSpec, ModelSpec
from mosaic.runtime.experts.arena import slot_nbytes
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING
from mosaic.runtime.footprint import FLOAT, host_scratch_nbytes, kv_nbytes, state_nbytes
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.machine import free_memory, resident_memory
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.resident import resident_nbytes
from mosaic.runtime.sizes import format_size
from mosaic.runtime.weights import Weights

if TYPE_CHECKING:
    from mosaic.runtime.plan_vram import VramPlan

HEADROOM = 768 << 20  # left to others when nobody says how much to take,
HEADROOM_SHARE = 8  # but at most one part in so many of what is free
GRAIN = 24 << 20  # what a process takes differs from start to start; so plans do not
GROWTH = 32 << 20  # what the program takes once it computes: code that is touched, small weights in float32, stacks
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


@dataclass(frozen=True)
class Wishes:
    """What may be said of the memory of a run. Sizes in bytes; what is None is chosen.

    `context`: tokens of a sequence. `parallel`: sequences at a time. `kept`: for recurrent states that later prompts
    may begin with. `budget`: for everything.
    """

    kv: KVFormat = KVFormat.BF16
    context: int | None = None
    parallel: int = 1
    kept: int | None = None
    budget: int | None = None


def free_budget() -> int:
    """Bytes that a run may take if nobody says how many: what is free here, less some head-room."""
    free = free_memory()
    return free + resident_memory() - min(HEADROOM, free // HEADROOM_SHARE)


def make_plan(weights: Weights, places: ExpertPlaces, wishes: Wishes, vram: "VramPlan | None" = None) -> MemoryPlan:
    """The plan of a run. Without a budget, it is `free_budget`.

    With `vram`, dense weights, keys and values and states that lie on the device take no memory here. The context is
    that of `vram` then.

    InputError if the budget is below what has to be in memory: dense weights, states, two layers' experts of a token.
    """
    spec, sequences = weights.catalog.spec, wishes.parallel
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
    context, state = wishes.context, state_nbytes(spec, spec.layers)
    first, head, piece = (vram.layers, not vram.head, vram.piece) if vram else (0, True, PREFILL_CHUNK)
    here, dense = spec.layers[first:], weights.dense(first, head=head)
    away = sum(info.nbytes for name, info in weights.dense().items() if name not in dense)
    most, least = (count * sequences * state if wishes.kept is None else wishes.kept for count in (KEPT, LEAST_KEPT))

    def fixed(kept: int, share: float) -> dict[str, int]:
        """Without weights. `share` of a layer's experts can be there at once."""
        of_all = f"{sequences} x " if sequences > 1 else ""
        tokens = min(piece, context)
        items = {
            "Python, torch, tokenizer": -(-resident_memory() // GRAIN) * GRAIN + GROWTH,
            f"keys and values of {of_all}{context:,} tokens": sequences * context * kv_nbytes(spec, here, wishes.kv),
            "recurrent states": sequences * state_nbytes(spec, here),
            "states kept for later prompts": kept,
            "logits": FLOAT * sequences * spec.vocab_size,
            "prompt in work": host_scratch_nbytes(spec, here, tokens, share),
        }
        if vram:
            items["staging for the device"] = _staging_nbytes(spec, places, vram, tokens, sequences)
        return items

    for kept in (most, least):
        mapped = {"weights": weights.nbytes - away, **fixed(kept, 1.0)}
        plan = MemoryPlan(budget, context, kept, None, len(places), mapped)
        if plan.total <= budget:
            return plan
    if not len(places):
        raise _too_little(plan.total, spec, here, wishes)
    if any(places[key].code_dtype == "F16" for key in places):  # kernels convert them, once for each place in memory
        raise InputError(
            "experts in float16 are only used in memory",
            found=f"{format_size(budget)} of memory, {format_size(plan.total)} needed",
            expected="E4M3, BF16 or F32 experts",
            remedy="give more with --ram, or convert the checkpoint again with a recipe that does not keep them",
        )
    slot = slot_nbytes(places)
    scales = sum(places[key].scale_nbytes for key in places)
    kept = min(max(least, budget // KEPT_SHARE), most)

    def with_slots(count: int, kept: int) -> MemoryPlan:
        items = {
            "expert slots": count * slot,
            "scales of all experts": scales,
            "dense weights": resident_nbytes(dense),
            **fixed(kept, min(1.0, count / places.num_experts)),
        }
        return MemoryPlan(budget, context, kept, count, len(places), items)

    low, high = 2 * places.top_k, len(places)
    if with_slots(low, kept).total > budget:
        kept = least
    needed = with_slots(low, kept).total
    if needed > budget:
        raise _too_little(needed, spec, here, wishes)
    while low < high:  # the most that fit; the share of a layer makes it no plain division
        middle = (low + high + 1) // 2
        low, high = (middle, high) if with_slots(middle, kept).total <= budget else (low, middle - 1)
    return with_slots(low, kept)


def _staging_nbytes(spec: ModelSpec, places: ExpertPlaces, vram: "VramPlan", tokens: int, sequences: int) -> int:
    """Buffers of experts on their way, what layers hand over, what experts here make of a step.

    And the recurrent states of a sequence that has not moved there yet.
    """
    expert = max((places[key].nbytes for key in places if places[key].kind == vram.kind), default=0)
    handed = 2 * tokens + sequences * (spec.moe.top_k + 1)  # there and back
    moving = state_nbytes(spec, spec.layers[: vram.layers])
    return RING * expert + FLOAT * handed * spec.hidden_size + moving


def _too_little(needed: int, spec: ModelSpec, here: Sequence[LayerSpec], wishes: Wishes) -> InputError:
    assert wishes.context is not None
    assert wishes.budget is not None
    tokens = wishes.parallel * wishes.context
    return InputError(
        "the memory does not suffice for this model",
        found=format_size(wishes.budget),
        expected=f"at least {format_size(needed)}, of which {tokens:,} tokens of context take "
        f"{format_size(tokens * kv_nbytes(spec, here, wishes.kv))}",
        remedy="give more with --ram, free some, or shorten --context",
    )


def affordable_context(spec: ModelSpec, layers: Sequence[LayerSpec], wishes: Wishes, budget: int) -> int:
    """Tokens of a sequence whose keys and values in these layers take no more of a budget than they should."""
    fitting = budget // KV_SHARE // max(wishes.parallel * kv_nbytes(spec, layers, wishes.kv), 1)
    return min(spec.max_position_embeddings, max(fitting // SHORTEST * SHORTEST, SHORTEST))


def shortest_context(spec: ModelSpec) -> int:
    """Tokens that a run has where memory is short and nobody says how many."""
    return min(SHORTEST, spec.max_position_embeddings)
