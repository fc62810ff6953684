"""Where the memory of a run goes, before it is taken: what fits a budget, and what has to be read again and again.

All figures are bytes of resident memory of this process at its peak. Nothing is allocated here.
"""

from dataclasses import dataclass, replace

from mosaic.format.errors import InputError
from mosaic.format.spec import Mixer, ModelSpec
from mosaic.runtime.experts.arena import slot_nbytes
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.kv import KVFormat, KVPool
from mosaic.runtime.machine import free_memory, resident_memory
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.resident import resident_nbytes
from mosaic.runtime.sizes import format_size
from mosaic.runtime.weights import Weights

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


def make_plan(weights: Weights, places: ExpertPlaces, wishes: Wishes) -> MemoryPlan:
    """The plan of a run. Without a budget, it is what is free here, less some head-room.

    InputError if the budget is below what has to be in memory: dense weights, states, two layers' experts of a token.
    """
    spec, kv, sequences = weights.catalog.spec, wishes.kv, wishes.parallel
    if wishes.budget is None:
        free = free_memory()
        budget = free + resident_memory() - min(HEADROOM, free // HEADROOM_SHARE)
        return make_plan(weights, places, replace(wishes, budget=budget))
    budget = wishes.budget
    if wishes.context is None:
        affordable, shortest = _affordable_context(spec, wishes, budget), min(SHORTEST, spec.max_position_embeddings)
        try:
            return make_plan(weights, places, replace(wishes, context=affordable))
        except InputError:
            return make_plan(weights, places, replace(wishes, context=shortest))
    context, state = wishes.context, _state_nbytes(spec)
    most, least = (count * sequences * state if wishes.kept is None else wishes.kept for count in (KEPT, LEAST_KEPT))

    def fixed(kept: int) -> dict[str, int]:
        of_all = f"{sequences} x " if sequences > 1 else ""
        return {
            "Python, torch, tokenizer": -(-resident_memory() // GRAIN) * GRAIN + GROWTH,
            f"keys and values of {of_all}{context:,} tokens": sequences * context * _kv_nbytes(spec, kv),
            "recurrent states": sequences * state,
            "states kept for later prompts": kept,
            "logits": 4 * sequences * spec.vocab_size,
        }

    for kept in (most, least):
        mapped = {"weights": weights.nbytes, **fixed(kept), "prompt in work": _scratch_nbytes(spec, context, 1.0)}
        plan = MemoryPlan(budget, context, kept, None, len(places), mapped)
        if plan.total <= budget:
            return plan
    if not len(places):
        raise _too_little(plan.total, spec, wishes)
    if any(places[key].code_dtype == "F16" for key in places):  # kernels convert them, once for each place in memory
        raise InputError(
            "experts in float16 are only used in memory",
            found=f"{format_size(budget)} of memory, {format_size(plan.total)} needed",
            expected="E4M3, BF16 or F32 experts",
            remedy="give more with --ram, or convert the checkpoint again with a recipe that does not keep them",
        )
    slot = slot_nbytes(places)
    scales = sum(places[key].scale_nbytes for key in places)
    dense = resident_nbytes(weights.dense())
    kept = min(max(least, budget // KEPT_SHARE), most)

    def with_slots(count: int, kept: int) -> MemoryPlan:
        share = min(1.0, count / places.num_experts)  # of a layer's experts that can be there at once
        items = {
            "expert slots": count * slot,
            "scales of all experts": scales,
            "dense weights": dense,
            **fixed(kept),
            "prompt in work": _scratch_nbytes(spec, context, share),
        }
        return MemoryPlan(budget, context, kept, count, len(places), items)

    low, high = 2 * places.top_k, len(places)
    if with_slots(low, kept).total > budget:
        kept = least
    needed = with_slots(low, kept).total
    if needed > budget:
        raise _too_little(needed, spec, wishes)
    while low < high:  # the most that fit; the share of a layer makes it no plain division
        middle = (low + high + 1) // 2
        low, high = (middle, high) if with_slots(middle, kept).total <= budget else (low, middle - 1)
    return with_slots(low, kept)


def _too_little(needed: int, spec: ModelSpec, wishes: Wishes) -> InputError:
    assert wishes.context is not None
    assert wishes.budget is not None
    tokens = wishes.parallel * wishes.context
    return InputError(
        "the memory does not suffice for this model",
        found=format_size(wishes.budget),
        expected=f"at least {format_size(needed)}, of which {tokens:,} tokens of context take "
        f"{format_size(tokens * _kv_nbytes(spec, wishes.kv))}",
        remedy="give more with --ram, free some, or shorten --context",
    )


def _affordable_context(spec: ModelSpec, wishes: Wishes, budget: int) -> int:
    fitting = budget // KV_SHARE // max(wishes.parallel * _kv_nbytes(spec, wishes.kv), 1)
    return min(spec.max_position_embeddings, max(fitting // SHORTEST * SHORTEST, SHORTEST))


def _kv_nbytes(spec: ModelSpec, kv: KVFormat) -> int:
    """Bytes of one token in all attention layers."""
    layers = sum(layer.mixer is Mixer.FULL_ATTENTION for layer in spec.layers)
    return layers * KVPool(spec.attention.num_kv_heads, spec.attention.head_dim, kv).token_nbytes


def _state_nbytes(spec: ModelSpec) -> int:
    """Bytes of the recurrent and convolution states of one sequence."""
    delta = spec.gated_delta
    if delta is None:
        return 0
    layers = sum(layer.mixer is not Mixer.FULL_ATTENTION for layer in spec.layers)
    recurrent = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    return 4 * layers * (recurrent + (delta.conv_kernel - 1) * delta.conv_dim)


def _scratch_nbytes(spec: ModelSpec, context: int, share: float) -> int:
    """Bytes that computing a prompt takes: of a chunk, what an attention or delta layer and its experts hold at once.

    `share` of a layer's experts may be computed with at the same time.
    """
    attention, delta, moe = spec.attention, spec.gated_delta, spec.moe
    query = attention.num_heads * attention.head_dim
    mixers = [query * (2 if attention.gated else 1) + 2 * attention.num_kv_heads * attention.head_dim + 2 * query]
    if delta:
        mixers.append(delta.conv_dim + 2 * delta.value_dim)
    ranks = moe.top_k + (1 if moe.shared_intermediate_size else 0)
    packed = 1.5 * (spec.hidden_size + max(moe.intermediate_size, moe.shared_intermediate_size))  # as AMX wants it
    values = 2 * max(mixers) + ranks * spec.hidden_size + 10 * spec.hidden_size
    values += int(packed * max(ranks * share, 1)) if moe.num_experts else 0
    values += 4 * (spec.dense_intermediate_size or 0)
    return 4 * values * min(PREFILL_CHUNK, context)
