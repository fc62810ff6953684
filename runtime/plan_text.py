"""What `mosaic-run --plan` prints: where the memory goes, and the speed that can be expected of it."""

from dataclasses import dataclass
from itertools import pairwise
from math import log2

from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.plan import MemoryPlan
from mosaic.runtime.plan_vram import VramPlan
from mosaic.runtime.sizes import format_size
from mosaic.runtime.speeds import Speeds

#: Hit rate of our policy by share of experts in memory, on synthetic routing with the skew and the repeats published
#: for Qwen3.6: 40 layers, 256 experts, 2,000 tokens (docs/LOG.md, "Replays").
PUBLISHED = ((1 / 32, 0.414), (1 / 16, 0.566), (1 / 8, 0.718), (1 / 4, 0.848), (1 / 2, 0.941), (1.0, 1.0))

SECONDS_PER_LAYER = 0.5e-3  # of a token, beside its weights (docs/LOG.md, 2026-11-30)


@dataclass(frozen=True)
class Expectation:
    """A hit rate, and the decode speed in tokens per second that follows."""

    hit_rate: float
    tok_s: float


def expectations(
    plan: MemoryPlan, places: ExpertPlaces, layers: int, dense: int, speeds: Speeds
) -> dict[str, Expectation]:
    """By kind of routing. `dense`: bytes of weights that every token reads in all layers, experts not counted."""
    chosen = places.top_k * len(places.layers)
    nbytes = places[next(iter(places))].nbytes if chosen else 0
    share = 1.0 if plan.slots is None else plan.slots / plan.num_experts

    def expectation(hit_rate: float) -> Expectation:
        seconds = layers * SECONDS_PER_LAYER
        seconds += (dense + chosen * nbytes) / speeds.weights + (1 - hit_rate) * chosen * nbytes / speeds.disk
        return Expectation(hit_rate, 1 / seconds)

    if plan.slots is None:
        return {"all in memory": expectation(1.0)}
    return {"uniform routing": expectation(share), "skewed routing": expectation(skewed_hit_rate(share))}


def skewed_hit_rate(share: float) -> float:
    """Expected of so large a share of the experts in memory; less than 1/32 is taken for proportional."""
    if share <= PUBLISHED[0][0]:
        return PUBLISHED[0][1] * share / PUBLISHED[0][0]
    (low, below), (high, above) = next(pair for pair in pairwise(PUBLISHED) if share <= pair[1][0])
    return below + (above - below) * log2(share / low) / log2(high / low)


def plan_lines(
    plan: MemoryPlan, expected: dict[str, Expectation], speeds: Speeds, vram: VramPlan | None = None
) -> list[str]:
    """For a person. With `vram` a second table follows."""
    lines = _table(plan)
    slots = plan.num_experts if plan.slots is None else plan.slots
    lines.append(f"experts in memory: {slots:,} of {plan.num_experts:,}; context: {plan.context:,} tokens")
    lines.append(
        f"weights are multiplied at {speeds.weights / 1e9:.1f} GB/s, experts read at {speeds.disk / 1e9:.2f} GB/s"
    )
    lines += [
        f"expected with {name}: hit rate {one.hit_rate:.0%}, {one.tok_s:.1f} tok/s"
        if plan.slots is not None
        else f"expected: {one.tok_s:.1f} tok/s"
        for name, one in expected.items()
    ]
    if vram:
        lines += ["", "On the device:", *_table(vram)]
        head = "with" if vram.head else "without"
        lines.append(f"experts in its slots: {vram.slots:,}; dense layers: {vram.layers}, {head} the head")
        lines.append(f"prompts in pieces of {vram.piece:,} tokens; kernels and graphs are assumed, not measured")
    return lines


def _table(plan: MemoryPlan | VramPlan) -> list[str]:
    rows = {**plan.items, "in all": plan.total, "of": plan.budget}
    return [f"{name:<44}{format_size(nbytes):>12}{nbytes:>18,}" for name, nbytes in rows.items()]


def plan_dict(
    plan: MemoryPlan, expected: dict[str, Expectation], speeds: Speeds, vram: VramPlan | None = None
) -> dict[str, object]:
    """For a machine."""
    return {
        **_figures(plan),
        "context": plan.context,
        "expert_slots": plan.slots,
        "experts": plan.num_experts,
        "weights_gb_s": speeds.weights / 1e9,
        "disk_gb_s": speeds.disk / 1e9,
        "expected": {name: {"hit_rate": one.hit_rate, "tok_s": one.tok_s} for name, one in expected.items()},
        "vram": _vram_dict(vram) if vram else None,
    }


def _vram_dict(vram: VramPlan) -> dict[str, object]:
    return {
        **_figures(vram),
        "expert_slots": vram.slots,
        "stream_slots": vram.stream,
        "layers": vram.layers,
        "head": vram.head,
        "piece": vram.piece,
    }


def _figures(plan: MemoryPlan | VramPlan) -> dict[str, object]:
    return {"items": plan.items, "total_bytes": plan.total, "budget_bytes": plan.budget}
