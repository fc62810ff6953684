"""The part of a model that a device has, taken there as it was planned: slots, dense layers, states, the head."""

from dataclasses import dataclass
from functools import partial

from mosaic.format.spec import ModelSpec
from mosaic.runtime.device import Device
from mosaic.runtime.device.states import DeviceStates
from mosaic.runtime.device.weights import DeviceWeights
from mosaic.runtime.experts.expert_slots import ExpertSlots, expert_slots
from mosaic.runtime.experts.hot import Costs
from mosaic.runtime.experts.placement import MIN_HITS
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.tier import STREAM_TOKENS, Tier, TierMemory
from mosaic.runtime.home import Home
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import Elsewhere
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.plan_vram import VramPlan
from mosaic.runtime.resident import TORCH
from mosaic.runtime.weights import Weights

LEAST_SAVING = 1  # nanoseconds: a device that saves nothing is used all the same if somebody asks for it


@dataclass(frozen=True)
class Tuning:
    """What changes the speed of a tier, and no bit if all kernels are the CPU's: see PlacementPolicy and Tier."""

    min_hits: int = MIN_HITS
    stream_tokens: int = STREAM_TOKENS


@dataclass(frozen=True)
class Part:
    """`tier` computes the experts, if the model has any. `elsewhere`: layers and head, if any lie on the device."""

    tier: Tier | None
    elsewhere: Elsewhere | None


def take_part(
    device: Device, weights: Weights, places: ExpertPlaces, host: CpuOps, plan: VramPlan, kv: KVFormat,
    sequences: int, expert_seconds: float, tuning: Tuning,
) -> Part:  # fmt: skip
    """Take the memory; weights are copied as the model asks for them. `expert_seconds`: of the host, for one expert."""
    spec = weights.spec
    tier = None
    if len(places):
        held = _slots(device, "expert slots", plan.slots, spec, plan)
        buffer = _slots(device, "streaming buffer", plan.stream if plan.layers else 0, spec, plan)
        costs = _costs(device, held, expert_seconds, tuning.min_hits) if held else Costs(1, LEAST_SAVING)
        tier = Tier(device, host, places, TierMemory(held, buffer), costs, tuning.stream_tokens)
    if not plan.layers:
        return Part(tier, None)
    states = DeviceStates(spec, kv, device.memory, layers=plan.layers, sequences=sequences, context=plan.context)
    there = DeviceWeights(weights, device.memory)
    mixing = tier.from_device if tier else None
    home = Home(device.ops, there, states.pool, states.new_state, device.bring, mixing, device.run, device.enter)
    return Part(tier, Elsewhere(home, plan.layers, plan.head))


def _costs(device: Device, held: ExpertSlots, expert_seconds: float, min_hits: int) -> Costs:
    copy, compute = device.measure(held)
    saving = max(round((expert_seconds - compute) * 1e9), LEAST_SAVING)
    return Costs(max(round(copy * 1e9), 1), saving, min_hits)


def _slots(device: Device, item: str, count: int, spec: ModelSpec, plan: VramPlan) -> ExpertSlots | None:
    if not count:
        return None
    assert plan.kind
    scales = TORCH[plan.kind[1]]
    return expert_slots(partial(device.memory.empty, item), count, spec.hidden_size, spec.moe.intermediate_size, scales)
