"""Full attention with grouped KV heads, query and key norms, rotary embedding and an optional output gate."""

import torch
from torch import Tensor

from mosaic.format.spec import ModelSpec
from mosaic.runtime.kv import KVCache
from mosaic.runtime.layers.linear import Linear
from mosaic.runtime.layers.norm import RmsNorm
from mosaic.runtime.ops import Ops
from mosaic.runtime.weights import ModelWeights


class Attention:
    """One attention mixer. Attends to what the cache holds, not to what was put in."""

    def __init__(self, ops: Ops, spec: ModelSpec, weights: ModelWeights, key: str) -> None:
        self._ops = ops
        self._spec = spec.attention
        self._inputs = [weights.matrix(f"{key}.{name}") for name in ("query", "key", "value")]
        self._output = Linear(ops, weights.matrix(f"{key}.output"))
        self._query_norm = RmsNorm(ops, weights.tensor(f"{key}.query_norm"), spec.rms_norm_eps, spec.norm_offset)
        self._key_norm = RmsNorm(ops, weights.tensor(f"{key}.key_norm"), spec.rms_norm_eps, spec.norm_offset)

    @property
    def nbytes(self) -> int:
        """Weight bytes read per use."""
        return sum(weight.nbytes for weight in (*self._inputs, self._output))

    def __call__(self, x: Tensor, cache: KVCache) -> Tensor:
        """X [T, H] -> [T, H]; appends T tokens to the cache."""
        spec, tokens = self._spec, x.shape[0]
        query, key, value = self._ops.linears(x, self._inputs)
        query = query.view(tokens, spec.num_heads, -1)
        gate = None
        if spec.gated:  # each head's rows are [query | gate]
            query, gate = query.chunk(2, dim=-1)
        key = key.view(tokens, spec.num_kv_heads, spec.head_dim)
        value = value.view(tokens, spec.num_kv_heads, spec.head_dim)
        positions = torch.arange(cache.length, cache.length + tokens)
        query, key = self._rotate(self._query_norm(query), positions), self._rotate(self._key_norm(key), positions)
        cache.append(key, value)
        result = self._ops.attention(query, cache)
        if gate is not None:
            result = self._ops.sigmoid_gate(result, gate)
        return self._output(result.reshape(tokens, -1))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._ops.rotate(x, positions, self._spec.rotary_dim, self._spec.rope_theta)
