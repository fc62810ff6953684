"""Gated DeltaNet: linear attention with a fixed-size state, a short convolution and a gated norm."""

import torch
from torch import Tensor

from mosaic.format.spec import GatedDeltaSpec, ModelSpec
from mosaic.runtime.layers.linear import Linear
from mosaic.runtime.ops import DeltaInputs, Ops
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import ModelWeights

CHUNK = 64  # tokens of one chunk; chunks begin at multiples of it, so their cuts depend on position alone


class GatedDeltaNet:
    """One linear-attention mixer. A single token takes the step form, more take the chunked form."""

    def __init__(self, ops: Ops, spec: ModelSpec, weights: ModelWeights, key: str) -> None:
        assert spec.gated_delta is not None
        self._ops = ops
        self._spec = spec.gated_delta
        self._eps = spec.rms_norm_eps
        names = ("qkvz", "ba") if self._spec.grouped else ("qkv", "z", "b", "a")
        self._inputs = [weights.matrix(f"{key}.{name}") for name in names]
        self._output = Linear(ops, weights.matrix(f"{key}.output"))
        self._conv = weights.tensor(f"{key}.conv")
        self._a_log = weights.tensor(f"{key}.a_log")
        self._dt_bias = weights.tensor(f"{key}.dt_bias")
        self._norm = weights.tensor(f"{key}.norm")

    @property
    def nbytes(self) -> int:
        """Weight bytes read per use."""
        return sum(weight.nbytes for weight in (*self._inputs, self._output, self._conv))

    def __call__(self, x: Tensor, state: DeltaState) -> Tensor:
        """X [T, H] -> [T, H]; advances the state by T tokens."""
        spec, tokens = self._spec, x.shape[0]
        outputs = self._ops.linears(x, self._inputs)
        qkv, z, b, a = _ungroup(outputs[0], outputs[1], spec) if spec.grouped else outputs
        mixed, state.conv = self._ops.causal_conv(qkv, state.conv, self._conv)
        query, key, value = torch.split(mixed, [spec.key_dim, spec.key_dim, spec.value_dim], dim=-1)
        inputs = DeltaInputs(
            query.view(tokens, spec.num_key_heads, spec.key_head_dim),
            key.view(tokens, spec.num_key_heads, spec.key_head_dim),
            value.view(tokens, spec.num_value_heads, spec.value_head_dim),
            *self._ops.delta_gates(a, b, self._a_log, self._dt_bias),
        )
        read = self._advance(inputs, state, tokens)
        gate = z.reshape(tokens, spec.num_value_heads, spec.value_head_dim)
        read = self._ops.gated_rms_norm(read, self._norm, gate, self._eps)
        return self._output(read.reshape(tokens, -1))

    def _advance(self, inputs: DeltaInputs, state: DeltaState, tokens: int) -> Tensor:
        """The delta rule over all tokens: [T, value heads, d_v]."""
        if tokens == 1:
            read, state.recurrent = self._ops.delta_step(inputs, state.recurrent)
            state.position += 1
            return read
        parts, first = [], 0
        while first < tokens:
            last = min(first + CHUNK - state.position % CHUNK, tokens)
            read, state.recurrent = self._ops.delta_chunk(inputs[first:last], state.recurrent)
            state.position += last - first
            parts.append(read)
            first = last
        return torch.cat(parts)


def _ungroup(qkvz: Tensor, ba: Tensor, spec: GatedDeltaSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(qkv, z, b, a) from projections whose rows are grouped by key head: the activations are permuted, not weights.

    Key head g holds [query | key | values of its value heads | their z], and [b | a] of its value heads.
    """
    tokens, heads = ba.shape[0], spec.num_key_heads
    ratio = spec.num_value_heads // heads
    widths = [spec.key_head_dim, spec.key_head_dim, ratio * spec.value_head_dim, ratio * spec.value_head_dim]
    query, key, value, z = torch.split(qkvz.view(tokens, heads, -1), widths, dim=-1)
    b, a = ba.view(tokens, heads, -1).chunk(2, dim=-1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (query, key, value)], dim=-1)
    return qkv, z.reshape(tokens, -1), b.reshape(tokens, -1), a.reshape(tokens, -1)
