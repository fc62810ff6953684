"""Both plans of a run, of the RAM and of a device's memory, with one context."""

from dataclasses import replace

from mosaic.format.errors import InputError
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.plan import MemoryPlan, affordable_context, free_budget, make_plan, shortest_context
from mosaic.runtime.plan_vram import VramPlan, make_vram_plan
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes, Wishes


def make_plans(
    weights: Weights, places: ExpertPlaces, wishes: Wishes, vram: VramWishes, vram_budget: int | None
) -> tuple[MemoryPlan, VramPlan | None]:
    """`vram_budget`: bytes that the device has to give; None without a device.

    If nobody says how long the context is, it is the smaller of what RAM and device can afford. InputError if one of
    the two does not suffice.
    """
    if vram_budget is None:
        return make_plan(weights, places, wishes), None
    if wishes.budget is None:
        wishes = replace(wishes, budget=free_budget())
    assert wishes.budget is not None
    spec = weights.spec

    def on_device(context: int) -> VramPlan:
        return make_vram_plan(weights, places, replace(wishes, context=context), vram, vram_budget)

    def both(context: int) -> tuple[MemoryPlan, VramPlan]:
        there = on_device(context)
        return make_plan(weights, places, wishes, there), there

    if wishes.context is not None:
        return both(wishes.context)
    affordable = affordable_context(spec, spec.layers[: vram.layers], wishes, vram_budget)
    try:
        here = spec.layers[on_device(affordable).layers :]
        return both(min(affordable, affordable_context(spec, here, wishes, wishes.budget)))
    except InputError:
        return both(shortest_context(spec))
