"""The table of operations by these kernels: which of them serves which shapes.

Up to eight vectors are the business of memory (`matvec`), more that of tensor cores (`matmul`). float32 activations;
weights are read as they are stored. States are changed in place. But for `experts` nothing waits for the device, and
what one token of each sequence needs can be recorded in a CUDA graph.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mosaic.runtime.device.states import DeviceCache
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.kv import KVCache, KVFormat
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, ExpertSource, Routing
from mosaic.runtime.ops.cuda.attention import attend
from mosaic.runtime.ops.cuda.delta import gated_delta_step
from mosaic.runtime.ops.cuda.delta_chunk import gated_delta_chunk
from mosaic.runtime.ops.cuda.experts import add_outputs, apply_experts
from mosaic.runtime.ops.cuda.gates import sigmoid_gate, swiglu_between
from mosaic.runtime.ops.cuda.grouped import apply_experts_grouped
from mosaic.runtime.ops.cuda.matmul import matmul, matmul_plain
from mosaic.runtime.ops.cuda.matvec import MOST_VECTORS, matvec
from mosaic.runtime.ops.cuda.norms import add_rms_norm, rms_norm
from mosaic.runtime.ops.cuda.pages import Pages, store
from mosaic.runtime.ops.cuda.rotary import Angles, angles, rotate
from mosaic.runtime.ops.cuda.router import route
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix, Weight


class CudaOps:
    """Implements DeviceOps. Caches are DeviceCaches; heads have a power of two of dims, at least 16."""

    def __init__(self) -> None:
        self._turn: tuple[Tensor, Angles] | None = None  # of the last positions: a key's are its query's

    def embed(self, rows: Tensor) -> Tensor:
        """See Ops."""
        return rows.to(torch.float32)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """See Ops."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= MOST_VECTORS:
            result = matvec(rows, weight)
        elif isinstance(weight, E4M3Matrix):
            result = matmul(rows, weight)
        else:
            result = matmul_plain(rows, weight)
        return result.view(*x.shape[:-1], -1)

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """See Ops."""
        return [self.linear(x, weight) for weight in weights]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """See Ops."""
        return rms_norm(x, weight, eps, offset)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """See Ops."""
        return add_rms_norm(x, y, weight, eps, offset)

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """See Ops. A model has one rotary_dim and theta."""
        if self._turn is None or self._turn[0] is not positions:
            self._turn = positions, angles(positions, rotary_dim, theta)
        return rotate(x, self._turn[1])

    def attention(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache) -> Tensor:
        """See Ops. How many tokens come before these, the cache's `count` says, on the device."""
        pages = _pages(cast(DeviceCache, cache))
        store(key, value, pages)
        return attend(query, pages)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Ops."""
        return sigmoid_gate(x, gate)

    def gated_delta(self, inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
        """See Ops."""
        advance = gated_delta_step if len(inputs.qkv) == 1 else gated_delta_chunk
        return advance(inputs, weights, state)

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """See Ops."""
        gate = None if shared is None else shared.reshape(-1, 1)
        routing = route(logits.reshape(-1, logits.shape[-1]), top_k, normalize, gate)
        shape = *logits.shape[:-1], -1
        return Routing(routing.experts.view(shape), routing.weights.view(shape))

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """See Ops."""
        return self.linear(swiglu_between(*self.linears(x, (gate, up))), down)

    def experts(self, x: Tensor, routing: Routing, source: ExpertSource) -> Tensor:
        """See Ops. Experts lie on the device, one is computed after the other; `apply` is for many in slots."""
        chosen = routing.experts.cpu()
        source.observe(chosen.numpy())
        outputs = torch.empty(*chosen.shape, x.shape[-1], device=x.device)
        for group in source.arriving(sorted(set(chosen.flatten().tolist())), x.shape[-2]):
            for number, expert in group.items():
                *tokens, ranks = (places.to(x.device) for places in torch.nonzero(chosen == number, as_tuple=True))
                outputs[*tokens, ranks] = self.swiglu(x[*tokens], expert.gate, expert.up, expert.down)
        return self.add_outputs(outputs, routing.weights)

    def apply(self, x: Tensor, slots: Tensor, held: ExpertSlots, outputs: Tensor) -> None:
        """See DeviceOps. For more than a few tokens they are grouped by expert."""
        rows, ranks = x.reshape(-1, held.hidden), slots.shape[-1]
        compute = apply_experts if len(rows) <= MOST_VECTORS else apply_experts_grouped
        compute(rows.contiguous(), slots.view(-1, ranks), held, outputs.view(-1, ranks, held.hidden))

    def add_outputs(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """See DeviceOps."""
        *shape, ranks, hidden = outputs.shape
        return add_outputs(outputs.view(-1, ranks, hidden), weights.view(-1, ranks)).view(*shape, hidden)


def _pages(cache: DeviceCache) -> Pages:
    """As kernels read them: codes of E4M3 are bytes to them."""
    pool = cache.pool
    if pool.format is KVFormat.E4M3:
        return Pages(pool.values.view(torch.uint8), pool.scales, cache.table, cache.count)
    return Pages(pool.values, None, cache.table, cache.count)
