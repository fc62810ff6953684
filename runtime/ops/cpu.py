"""Every operation by `mosaic._native`: float32 activations, weights read where they lie, all cores.

Results do not depend on the number of threads, nor a token's on what is computed with it. States are changed in place.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic import _native
from mosaic.runtime.ops import DeltaInputs, Routing
from mosaic.runtime.state import KVCache
from mosaic.runtime.weights import E4M3Matrix, Expert, Weight

Floats = NDArray[np.float32]


class Activations(StrEnum):
    """What E4M3 weights are multiplied with: where the CPU multiplies no bfloat16, it is float32 all the same."""

    F32 = "f32"
    BF16 = "bf16"


def set_threads(count: int) -> None:
    """How many threads the operations run on. Torch, which would spin beside them, gets one."""
    _native.set_threads(count)
    torch.set_num_threads(1)


def threads() -> int:
    """How many threads the operations run on; from the start MOSAIC_THREADS or the number of cores."""
    return _native.threads()


def isa() -> str:
    """The instruction set of the fastest kernels here, or the one that MOSAIC_ISA names."""
    return _native.isa()


class CpuOps:
    """Implements `mosaic.runtime.ops.Ops`. `isa`: kernels of this instruction set; the fastest if empty."""

    def __init__(self, activations: Activations = Activations.F32, isa: str = "") -> None:
        self._bf16 = activations is Activations.BF16
        self._isa = isa
        # By where a weight lies and what it is; kept with it, so that nothing else can come to lie there.
        self._matrices: dict[tuple[Any, ...], tuple[Any, _native.Matrix]] = {}
        self._experts: dict[tuple[Any, ...], tuple[Any, _native.Expert]] = {}
        self._floats: dict[tuple[Any, ...], tuple[Tensor, Floats]] = {}

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """See Ops."""
        return table[ids].to(torch.float32)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """See Ops."""
        result = np.empty((x.shape[0], weight.shape[0]), np.float32)
        _native.linear(self._matrix(weight), x.contiguous().numpy(), result, self._bf16, self._isa)
        return torch.from_numpy(result)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """See Ops."""
        result = np.empty(x.shape, np.float32)
        _native.rms_norm(_rows(x), self._float(weight), result, eps, offset, self._isa)
        return torch.from_numpy(result)

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """See Ops."""
        result = np.empty(x.shape, np.float32)
        arguments = (x.contiguous().numpy(), self._float(weight), gate.contiguous().numpy(), result)
        _native.gated_rms_norm(*arguments, eps, self._isa)
        return torch.from_numpy(result)

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """See Ops."""
        result = np.empty(x.shape, np.float32)
        _native.rotate(x.contiguous().numpy(), positions.numpy(), result, rotary_dim, theta, self._isa)
        return torch.from_numpy(result)

    def attention(self, query: Tensor, cache: KVCache) -> Tensor:
        """See Ops. Reads keys and values where the cache has them."""
        result = np.empty(query.shape, np.float32)
        pages, scales = cache.addresses()
        arguments = (query.contiguous().numpy(), pages, scales, result, cache.length, cache.kv_heads)
        _native.attention(*arguments, cache.format, self._isa)
        return torch.from_numpy(result)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Ops."""
        result = np.empty(x.shape, np.float32)
        _native.sigmoid_gate(x.contiguous().numpy(), gate.contiguous().numpy(), result, self._isa)
        return torch.from_numpy(result)

    def causal_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See Ops. `history` is changed in place."""
        result = np.empty(x.shape, np.float32)
        taps = self._float(weight).reshape(weight.shape[0], -1)
        _native.causal_conv(_rows(x), history.numpy(), taps, result, self._isa)
        return torch.from_numpy(result), history

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """See Ops."""
        log_decay, beta = torch.empty(a.shape), torch.empty(b.shape)
        inputs = (a.contiguous().numpy(), b.contiguous().numpy(), self._float(a_log), self._float(dt_bias))
        _native.delta_gates(*inputs, log_decay.numpy(), beta.numpy(), self._isa)
        return log_decay, beta

    def delta_step(self, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """See Ops. `state` is changed in place."""
        result = np.empty(inputs.value.shape, np.float32)
        query, key, value = _rows(inputs.query), _rows(inputs.key), _rows(inputs.value)
        gates = inputs.log_decay.contiguous().numpy(), inputs.beta.contiguous().numpy()
        _native.delta_rule(query, key, value, *gates, state.numpy(), result, self._isa)
        return torch.from_numpy(result), state

    delta_chunk = delta_step  # token by token: a head's state stays in the core's cache

    def route(self, x: Tensor, router: Weight, top_k: int, normalize: bool) -> Routing:
        """See Ops."""
        logits = self.linear(x, router)
        routing = Routing(torch.empty(x.shape[0], top_k, dtype=torch.int64), torch.empty(x.shape[0], top_k))
        _native.route(logits.numpy(), normalize, routing.experts.numpy(), routing.weights.numpy())
        return routing

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """See Ops. One expert that every token uses."""
        tokens = x.shape[0]
        slots, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
        return self._mix(x, [self._expert(Expert(gate, up, down))], slots, weights)

    def experts(self, x: Tensor, routing: Routing, expert: Callable[[int], Expert]) -> Tensor:
        """See Ops."""
        if x.shape[0] == 1:
            used = [self._expert(expert(number)) for number in routing.experts[0].tolist()]
            return self._mix(x, used, np.arange(len(used), dtype=np.int32)[None], routing.weights.numpy())
        numbers, slots = np.unique(routing.experts.numpy(), return_inverse=True)
        used = [self._expert(expert(number)) for number in numbers.tolist()]
        return self._mix(x, used, slots.astype(np.int32).reshape(routing.experts.shape), routing.weights.numpy())

    def _mix(self, x: Tensor, experts: list[_native.Expert], slots: NDArray[np.int32], weights: Floats) -> Tensor:
        result = np.empty(x.shape, np.float32)
        _native.mix_experts(experts, slots, weights, x.contiguous().numpy(), result, self._bf16, self._isa)
        return torch.from_numpy(result)

    def _matrix(self, weight: Weight) -> _native.Matrix:
        key = _place(weight)
        if key not in self._matrices:
            self._matrices[key] = weight, _bind(weight)
        return self._matrices[key][1]

    def _expert(self, expert: Expert) -> _native.Expert:
        key = (*_place(expert.gate), *_place(expert.up), *_place(expert.down))
        if key not in self._experts:
            bound = _native.Expert(_bind(expert.gate), _bind(expert.up), _bind(expert.down))
            self._experts[key] = expert, bound
        return self._experts[key][1]

    def _float(self, weight: Tensor) -> Floats:
        """A small weight in float32, converted once."""
        key = _place(weight)
        if key not in self._floats:
            self._floats[key] = weight, weight.float().contiguous().numpy()
        return self._floats[key][1]


def _place(weight: Weight) -> tuple[Any, ...]:
    """Where it lies and what it is."""
    if isinstance(weight, E4M3Matrix):
        return (weight.codes.data_ptr(), weight.codes.shape, weight.scales.data_ptr())
    return (weight.data_ptr(), weight.shape, weight.dtype)


def _bind(weight: Weight) -> _native.Matrix:
    if isinstance(weight, E4M3Matrix):
        return _native.Matrix(weight.codes.numpy(), _bits(weight.scales))
    return _native.Matrix(_bits(weight if weight.dtype != torch.float16 else weight.float()))


def _bits(values: Tensor) -> NDArray[Any]:
    """As numpy knows it: bfloat16 as uint16."""
    array: NDArray[Any] = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    return array


def _rows(x: Tensor) -> Floats:
    """As numpy, rows with gaps between them as they are."""
    inner = x[0] if x.shape[0] else x
    array: Floats = (x if inner.is_contiguous() else x.contiguous()).numpy()
    return array
