"""A whole model on a device whose operations are `CudaOps`: under triton's interpreter that device is the CPU."""

import torch

from mosaic.format.spec import FeedForward
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.device.states import DeviceStates
from mosaic.runtime.device.weights import DeviceWeights
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.home import Home, plainly
from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.model import Elsewhere, HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.cuda.ops import CudaOps
from mosaic.runtime.weights import Weights

CONTEXT, SEQUENCES = 3 * PAGE_TOKENS, 3


class Slots:
    """A Mixing: every routed expert of a model is in a slot."""

    def __init__(self, weights: Weights, ops: CudaOps, memory: Memory) -> None:
        self.ops = ops
        spec = weights.spec
        self.experts = spec.moe.num_experts
        sizes = spec.hidden_size, spec.moe.intermediate_size
        codes, scales = [], []
        self.first: dict[int, int] = {}  # slot of a layer
        for layer, kinds in enumerate(spec.layers):
            if kinds.feed_forward is not FeedForward.MOE:
                continue
            self.first[layer] = len(codes)
            for expert in range(self.experts):
                key = f"layers.{layer}.moe.experts.{expert}"
                parts = [weights.matrix(f"{key}.{name}") for name in ("gate", "up", "down")]
                codes.append(torch.cat([part.codes.flatten() for part in parts]))
                scales.append(torch.cat([part.scales.flatten() for part in parts]))
        self.held = ExpertSlots(*(memory.put("slots", torch.stack(part)) for part in (codes, scales)), *sizes)

    def __call__(self, x, routing, shared, source):
        outputs = torch.empty(*routing.experts.shape, x.shape[-1], device=x.device)
        if shared is not None:
            outputs[..., -1, :] = shared
        slots = torch.where(routing.experts < self.experts, self.first[source.layer] + routing.experts, -1)
        self.ops.apply(x, slots.int(), self.held, outputs)
        return self.ops.add_outputs(outputs, routing.weights)


def on_device(weights, kv, device, *, slots=True, run=plainly):
    """All layers and the head. `slots`: experts are in slots; else one after the other, where the weights are."""
    memory, ops, layers = Memory(device), CudaOps(), len(weights.spec.layers)
    room = {"sequences": SEQUENCES, "context": CONTEXT}
    states = DeviceStates(weights.spec, kv, memory, layers=layers, **room)
    mixing = Slots(weights, ops, memory) if slots else None
    placed = DeviceWeights(weights, memory)
    home = Home(ops, placed, states.pool, states.new_state, lambda x: x.to(device), mixing, run)
    return HybridModel(weights, CpuOps(), kv, elsewhere=Elsewhere(home, layers, head=True))
