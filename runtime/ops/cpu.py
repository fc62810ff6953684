"""Every operation by `mosaic._native`: float32 activations, weights read where they lie, all cores.

Results do not depend on the number of threads, nor a token's on what is computed with it, other sequences included.
States are changed in place.
"""

import math
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic import _native
from mosaic.runtime.kv import KVCache
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, ExpertSource, Routing
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix, Expert, Weight

Floats = NDArray[np.float32]
LARGE = 1 << 18  # elements; smaller ones the allocator keeps
NOT_NOW = -1  # as kNotNow in native/src/matrix.h
UNHELD = 3  # references to an array that a list holds, a loop's variable and the call that counts


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
        self._results = Results()
        # What the kernels know weights by, found by the weights' id; these are kept with it, so the id stays theirs.
        self._matrices: dict[int, tuple[Weight, _native.Matrix]] = {}
        self._experts: dict[int, tuple[Expert, _native.Expert]] = {}
        self._floats: dict[int, tuple[Tensor, Floats]] = {}

    def embed(self, rows: Tensor) -> Tensor:
        """See Ops."""
        return rows.to(torch.float32)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """See Ops."""
        return self.linears(x, [weight])[0]

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """See Ops. Activations are prepared once, and all is one piece of work for the threads."""
        results = [self._results.take((*x.shape[:-1], weight.shape[0])) for weight in weights]
        matrices = [self._matrix(weight) for weight in weights]
        _native.linear(matrices, x.contiguous().numpy(), results, self._bf16, self._isa)
        return [torch.from_numpy(result) for result in results]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """See Ops."""
        result = self._results.take(x.shape)
        _native.rms_norm(_rows(x), self._float(weight), result, eps, offset, self._isa)
        return torch.from_numpy(result)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """See Ops."""
        total, result = self._results.take(x.shape), self._results.take(x.shape)
        terms = x.contiguous().numpy(), y.contiguous().numpy()
        _native.add_rms_norm(*terms, self._float(weight), total, result, eps, offset, self._isa)
        return torch.from_numpy(total), torch.from_numpy(result)

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """See Ops."""
        result = self._results.take(x.shape)
        _native.rotate(x.contiguous().numpy(), positions.numpy(), result, rotary_dim, theta, self._isa)
        return torch.from_numpy(result)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache) -> Tensor:
        """See Ops. Reads keys and values where the cache has them."""
        cache.write(key, value)
        result = self._results.take(query.shape)
        pages, scales = cache.addresses()
        arguments = (query.contiguous().numpy(), pages, scales, result, cache.length, cache.kv_heads)
        _native.attention(*arguments, cache.format, self._isa)
        return torch.from_numpy(result)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Ops."""
        result = self._results.take(x.shape)
        _native.sigmoid_gate(x.contiguous().numpy(), gate.contiguous().numpy(), result, self._isa)
        return torch.from_numpy(result)

    def gated_delta(self, inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
        """See Ops. Token by token: a head's state stays in the core's cache."""
        result = self._results.take(inputs.z.shape)
        _native.gated_delta(
            inputs.qkv.contiguous().numpy(),
            inputs.z.contiguous().numpy(),
            inputs.b.contiguous().numpy(),
            inputs.a.contiguous().numpy(),
            self._float(weights.conv),
            self._float(weights.a_log),
            self._float(weights.dt_bias),
            self._float(weights.norm),
            state.conv.numpy(),
            state.recurrent.numpy(),
            result,
            weights.eps,
            self._isa,
        )
        return torch.from_numpy(result)

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """See Ops."""
        shape = (*logits.shape[:-1], top_k if shared is None else top_k + 1)
        experts, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
        gate = None if shared is None else shared.contiguous().numpy()
        _native.route(logits.contiguous().numpy(), gate, normalize, experts, weights)
        return Routing(torch.from_numpy(experts), torch.from_numpy(weights))

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """See Ops. One expert that every token uses."""
        shape = (*x.shape[:-1], 1)
        slots, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
        expert = _native.Expert(self._matrix(gate), self._matrix(up), self._matrix(down))
        result = self._results.take(x.shape)
        _native.mix_experts([expert], slots, weights, x.contiguous().numpy(), result, self._bf16, self._isa)
        return torch.from_numpy(result)

    def experts(self, x: Tensor, routing: Routing, source: ExpertSource) -> Tensor:
        """See Ops. One call if all experts are there at once."""
        chosen = routing.experts.numpy()
        source.observe(chosen)
        alone = chosen.size == chosen.shape[-1]
        numbers = chosen.ravel().tolist() if alone else np.unique(chosen).tolist()
        order = np.full(max(numbers) + 1, NOT_NOW, np.int32)  # by number, its place in the group
        vectors, weights = x.contiguous().numpy(), routing.weights.numpy()
        result, outputs = self._results.take(x.shape), None
        for group in source.arriving(numbers, x.shape[-2]):
            if not group:
                continue
            order[list(group)] = np.arange(len(group))
            slots = order[chosen]
            used = [self._expert(expert) for expert in group.values()]
            if outputs is None and slots.min() != NOT_NOW:
                _native.mix_experts(used, slots, weights, vectors, result, self._bf16, self._isa)
                continue
            if outputs is None:
                outputs = self._results.take((*chosen.shape, x.shape[-1]))
            _native.apply_experts(used, slots, vectors, outputs, self._bf16, self._isa)
            order.fill(NOT_NOW)
        if outputs is not None:
            _native.add_outputs(outputs, weights, result)
        return torch.from_numpy(result)

    def apply_experts(self, x: Tensor, places: NDArray[np.int32], experts: Sequence[Expert], outputs: Tensor) -> None:
        """Outputs [.., R, H] of experts for x [.., H]: of each by its place [.., R]; of -1 they stay as they are."""
        used = [self._expert(expert) for expert in experts]
        _native.apply_experts(used, places, x.contiguous().numpy(), outputs.numpy(), self._bf16, self._isa)

    def add_outputs(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Sum over R of outputs [.., R, H] by weights [.., R], in their order: [.., H]."""
        result = self._results.take((*outputs.shape[:-2], outputs.shape[-1]))
        _native.add_outputs(outputs.numpy(), weights.numpy(), result)
        return torch.from_numpy(result)

    def _matrix(self, weight: Weight) -> _native.Matrix:
        found = self._matrices.get(id(weight))
        if found is None:
            found = self._matrices[id(weight)] = weight, _bind(weight)
        return found[1]

    def _expert(self, expert: Expert) -> _native.Expert:
        found = self._experts.get(id(expert))
        if found is None:
            bound = _native.Expert(_bind(expert.gate), _bind(expert.up), _bind(expert.down))
            found = self._experts[id(expert)] = expert, bound
        return found[1]

    def _float(self, weight: Tensor) -> Floats:
        """A small weight in float32, converted once."""
        found = self._floats.get(id(weight))
        if found is None:
            found = self._floats[id(weight)] = weight, weight.float().contiguous().numpy()
        return found[1]


class Results:
    """Memory for results. That of large ones is used again when nobody holds them any more.

    The system clears fresh pages, which takes longer than many an operation that would fill them.
    """

    def __init__(self) -> None:
        self._large: list[Floats] = []

    def take(self, shape: Sequence[int]) -> Floats:
        """An array of float32 with anything in it."""
        count = math.prod(shape)
        if count < LARGE:
            return np.empty(shape, np.float32)
        free = [memory for memory in self._large if sys.getrefcount(memory) == UNHELD and memory.size >= count]
        if free:
            memory = min(free, key=len)
        else:
            self._large = [memory for memory in self._large if sys.getrefcount(memory) > UNHELD]  # too small
            memory = np.empty(count, np.float32)
            self._large.append(memory)
        return memory[:count].reshape(shape)


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
    as_it_is = x.is_contiguous() or x[0].is_contiguous()
    array: Floats = (x if as_it_is else x.contiguous()).numpy()
    return array
