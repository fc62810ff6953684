"""Gated DeltaNet: linear attention with a fixed-size state, a short convolution and a gated norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mosaic.format.spec import GatedDeltaSpec, ModelSpec
from mosaic.runtime.layers.linear import Linear
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, Ops
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import ModelWeights


class GatedDeltaNet:
    """One linear-attention mixer."""

    def __init__(self, ops: Ops, spec: ModelSpec, weights: ModelWeights, key: str) -> None:
        assert spec.gated_delta is not None
        self._ops = ops
        self._spec = spec.gated_delta
        names = ("qkvz", "ba") if self._spec.grouped else ("qkv", "z", "b", "a")
        self._inputs = [weights.matrix(f"{key}.{name}") for name in names]
        self._output = Linear(ops, weights.matrix(f"{key}.output"))
        conv, a_log, dt_bias, norm = (weights.tensor(f"{key}.{name}") for name in ("conv", "a_log", "dt_bias", "norm"))
        self._weights = DeltaWeights(conv.squeeze(1), a_log, dt_bias, norm, spec.rms_norm_eps)

    @property
    def nbytes(self) -> int:
        """Weight bytes read per use."""
        return sum(weight.nbytes for weight in (*self._inputs, self._output, self._weights.conv))

    def __call__(self, x: Tensor, states: Sequence[DeltaState]) -> Tensor:
        """X [T, H] of one sequence or [B, T, H] of B -> the same shape; changes the state of each."""
        outputs = self._ops.linears(x, self._inputs)
        if x.dim() == 2:
            return self._output(self._mix(outputs, states[0]))
        parts = zip(*(output.unbind() for output in outputs), strict=True)
        mixed = [self._mix(part, state) for part, state in zip(parts, states, strict=True)]
        return self._output(torch.stack(mixed))

    def _mix(self, outputs: Sequence[Tensor], state: DeltaState) -> Tensor:
        """Of one sequence, what is between its projections."""
        inputs = _ungroup(outputs[0], outputs[1], self._spec) if self._spec.grouped else DeltaInputs(*outputs)
        return self._ops.gated_delta(inputs, self._weights, state)


def _ungroup(qkvz: Tensor, ba: Tensor, spec: GatedDeltaSpec) -> DeltaInputs:
    """From projections whose rows are grouped by key head: the activations are permuted, not weights.

    Key head g holds [query | key | values of its value heads | their z], and [b | a] of its value heads.
    """
    tokens, heads = ba.shape[0], spec.num_key_heads
    ratio = spec.num_value_heads // heads
    widths = [spec.key_head_dim, spec.key_head_dim, ratio * spec.value_head_dim, ratio * spec.value_head_dim]
    query, key, value, z = torch.split(qkvz.view(tokens, heads, -1), widths, dim=-1)
    b, a = ba.view(tokens, heads, -1).chunk(2, dim=-1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (query, key, value)], dim=-1)
    return DeltaInputs(qkv, *(part.reshape(tokens, -1) for part in (z, b, a)))
