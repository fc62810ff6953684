"""The specification of every operation: torch on the CPU, slow and exact.

Everything is float64, activations and recurrent states too; only weights and the KV cache are rounded, as they are
stored. So how tokens are grouped into calls does not show, and a faster implementation can be held to a tight bound.
Maths and traps: docs/MODELS.md, section 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from mosaic.format.e4m3 import BLOCK, VALUES
from mosaic.runtime.kv import KVCache
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, ExpertSource, Routing, reference_delta
from mosaic.runtime.ops.reference_delta import EXACT, rms
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix, Weight

ROWS = 32 * BLOCK  # rows of a matrix that are dequantised at a time

_CODE_VALUES = torch.tensor(VALUES, dtype=EXACT)


class ReferenceOps:
    """Implements `mosaic.runtime.ops.Ops`."""

    def embed(self, rows: Tensor) -> Tensor:
        """See Ops."""
        return rows.to(EXACT)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """See Ops. At most ROWS rows of the matrix exist in float at any time."""
        rows = weight.shape[0]
        parts = [x.to(EXACT) @ _exact(weight, first, min(first + ROWS, rows)).T for first in range(0, rows, ROWS)]
        return torch.cat(parts, dim=-1)

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """See Ops."""
        return [self.linear(x, weight) for weight in weights]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """See Ops."""
        return rms(x, eps) * (offset + weight.to(EXACT))

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """See Ops."""
        total = x.to(EXACT) + y.to(EXACT)
        return total, self.rms_norm(total, weight, eps, offset)

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """See Ops."""
        frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=EXACT) / rotary_dim)
        angles = positions.to(EXACT)[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :rotary_dim].to(EXACT).chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned, x[..., rotary_dim:].to(EXACT)), dim=-1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache) -> Tensor:
        """See Ops."""
        cache.write(key, value)
        return self.attend(query, *cache.read())

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same with key and value [S, kv heads, d]. One head at a time, so that scratch is T x S."""
        tokens, heads, dim = query.shape
        seen, kv_heads, _ = key.shape
        future = torch.arange(seen) > torch.arange(seen - tokens, seen)[:, None]
        result = torch.empty(tokens, heads, dim, dtype=EXACT)
        for kv_head in range(kv_heads):
            keys, values = key[:, kv_head].to(EXACT), value[:, kv_head].to(EXACT)
            for head in range(kv_head * (heads // kv_heads), (kv_head + 1) * (heads // kv_heads)):
                scores = query[:, head].to(EXACT) @ keys.T * dim**-0.5
                result[:, head] = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ values
        return result

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Ops."""
        return x.to(EXACT) * gate.to(EXACT).sigmoid()

    def gated_delta(self, inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
        """See Ops."""
        return reference_delta.gated_delta(inputs, weights, state)

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """See Ops."""
        best, experts = (part[..., :top_k] for part in logits.sort(dim=-1, descending=True, stable=True))
        # softmax over the chosen is the same as dividing the chosen shares by their sum
        weights = best.softmax(dim=-1) if normalize else logits.softmax(dim=-1).gather(-1, experts)
        if shared is not None:
            experts = torch.cat((experts, torch.full_like(experts[..., :1], logits.shape[-1])), dim=-1)
            weights = torch.cat((weights, shared.sigmoid()), dim=-1)
        return Routing(experts, weights)

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """See Ops."""
        hidden = silu(self.linear(x, gate)) * self.linear(x, up)
        return self.linear(hidden, down)

    def experts(self, x: Tensor, routing: Routing, source: ExpertSource) -> Tensor:
        """See Ops. Tokens grouped by expert; one expert dequantised at a time."""
        source.observe(routing.experts.numpy())
        outputs = torch.empty(*routing.experts.shape, x.shape[-1], dtype=EXACT)  # [.., R, H]
        numbers = sorted(set(routing.experts.flatten().tolist()))
        for group in source.arriving(numbers, x.shape[-2]):
            for number, expert in group.items():
                *tokens, ranks = torch.nonzero(routing.experts == number, as_tuple=True)
                outputs[*tokens, ranks] = self.swiglu(x[*tokens], expert.gate, expert.up, expert.down)
        return (outputs * routing.weights[..., None]).sum(dim=-2)


def _exact(weight: Weight, first: int, last: int) -> Tensor:
    """Rows [first, last) of a weight in float64; `first` is the start of a block."""
    if not isinstance(weight, E4M3Matrix):
        return weight[first:last].to(EXACT)
    codes = weight.codes[first:last]
    values = _CODE_VALUES.index_select(0, codes.reshape(-1).int()).view(codes.shape)  # 5 x torch's own float8 cast
    scales = weight.scales[first // BLOCK : -(-last // BLOCK)].to(EXACT)
    spread = scales.repeat_interleave(BLOCK, 0)[: codes.shape[0]].repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return values.mul_(spread)
