"""Full attention with grouped KV heads, query and key norms, rotary embedding and an optional output gate."""

from collections.abc import Sequence

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

    def __call__(self, x: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """X [T, H] of one sequence or [B, T, H] of B -> the same shape. Each cache counts them already."""
        spec, tokens = self._spec, x.shape[-2]
        rows = tokens * len(caches)
        query, key, value = self._ops.linears(x, self._inputs)
        query = query.view(rows, spec.num_heads, -1)
        gate = None
        if spec.gated:  # each head's rows are [query | gate]
            query, gate = query.chunk(2, dim=-1)
        key = key.view(rows, spec.num_kv_heads, spec.head_dim)
        value = value.view(rows, spec.num_kv_heads, spec.head_dim)
        positions = torch.cat([cache.positions(tokens) for cache in caches])
        query, key = self._rotate(self._query_norm(query), positions), self._rotate(self._key_norm(key), positions)
        parts = zip(caches, *(torch.split(part, tokens) for part in (query, key, value)), strict=True)
        results = [self._attend(*part) for part in parts]
        result = results[0] if len(results) == 1 else torch.cat(results)
        if gate is not None:
            result = self._ops.sigmoid_gate(result, gate)
        return self._output(result.reshape(*x.shape[:-1], -1))

    def _attend(self, cache: KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = self._ops.attention(query, key, value, cache)
        cache.passed(query.shape[0])
        return result

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._ops.rotate(x, positions, self._spec.rotary_dim, self._spec.rope_theta)
