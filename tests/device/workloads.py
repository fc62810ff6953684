"""What a model's layers ask of a device: operations, with the bytes and arithmetic that they cannot do without.

Written against `DeviceOps`, so a GPU's kernels and the CPU's take the same inputs and can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from mosaic.format import e4m3
from mosaic.format.spec import GatedDeltaSpec, ModelSpec
from mosaic.runtime.device import Device
from mosaic.runtime.device.states import DeviceStates
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.kv import KVCache, KVFormat
from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.reference_delta import CHUNK
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix

BF16, EPS, SEED = torch.bfloat16, 1e-6, 0
FLOAT32, TENSOR_CORES = "float32", "tensor cores"
NOT_NAN = 0x77  # bits of a code: with one of its exponent's cleared, none is NaN
FEW = 8  # vectors, at most, that are multiplied in float32: see `mosaic.runtime.ops.cuda.ops`
PASSES = 2  # over tensor cores, of more than that

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """`make` gives runs that do the same, each with weights or states at a place of its own in a device's memory.

    A run moves `nbytes` of these, and does so many `operations`; `unit`: by what, "tensor cores" or "float32".
    """

    what: str
    nbytes: float
    operations: float
    unit: str
    make: Callable[[Device, int], list[Run]]


@dataclass(frozen=True)
class Sizes:
    """`few`: vectors of decoding in company. `tokens`: of a piece of a prompt, after some `before`. `long`: a context.

    `rows`: of the head; fewer than a true one has.
    """

    few: int = 8
    tokens: int = 1024
    before: int = 4096
    long: int = 32768
    rows: int = 32768


def workloads(spec: ModelSpec, sizes: Sizes) -> list[Workload]:
    """Of decoding, then of prompts. `spec`: of one layer, attention."""
    assert spec.gated_delta
    few, tokens = sizes.few, sizes.tokens
    return [
        _matrix("E4M3 matrix, 1 vector", spec, 1),
        _matrix(f"E4M3 matrix, {few} vectors", spec, few),
        _head(f"BF16 matrix, 1 vector, {sizes.rows:,} rows", spec, sizes.rows),
        _experts("experts of 1 token", spec, 1),
        _experts(f"experts of {few} tokens", spec, few),
        _attention(f"attention of 1 token after {sizes.long:,}", spec, 1, sizes.long),
        _delta("delta rule, 1 token", spec.gated_delta, 1),
        _matrix(f"E4M3 matrix, {tokens:,} vectors", spec, tokens),
        _experts(f"experts of {tokens:,} tokens", spec, tokens),
        _attention(f"attention of {tokens:,} tokens after {sizes.before:,}", spec, tokens, sizes.before),
        _delta(f"delta rule, {tokens:,} tokens", spec.gated_delta, tokens),
    ]


def _matrix(what: str, spec: ModelSpec, count: int) -> Workload:
    """The largest of a layer: what a Gated DeltaNet begins with."""
    assert spec.gated_delta
    shape = spec.gated_delta.conv_dim, spec.hidden_size

    def make(device: Device, copies: int) -> list[Run]:
        codes, scales, x = _codes(*shape), _scales(*e4m3.grid(shape)), device.bring(_normal(count, shape[1]))
        held = [E4M3Matrix(_put(device, codes), _put(device, scales)) for _ in range(copies)]
        return [partial(device.ops.linear, x, matrix) for matrix in held]

    weights = shape[0] * shape[1]
    return Workload(what, weights, *_products(count, count * weights), make)


def _head(what: str, spec: ModelSpec, rows: int) -> Workload:
    def make(device: Device, copies: int) -> list[Run]:
        matrix, x = _normal(rows, spec.hidden_size).to(BF16), device.bring(_normal(1, spec.hidden_size))
        return [partial(device.ops.linear, x, _put(device, matrix)) for _ in range(copies)]

    nbytes = 2 * rows * spec.hidden_size
    return Workload(what, nbytes, nbytes, FLOAT32, make)


def _experts(what: str, spec: ModelSpec, tokens: int) -> Workload:
    """Those of a token are not those of the next, as far as there are any."""
    hidden, inner, ranks = spec.hidden_size, spec.moe.intermediate_size, spec.moe.top_k
    count, weights = min(tokens * ranks, spec.moe.num_experts), 3 * hidden * inner

    def make(device: Device, copies: int) -> list[Run]:
        codes, scales = _codes(count, weights), _scales(count, 3 * prod(e4m3.grid((inner, hidden))))
        held = [ExpertSlots(_put(device, codes), _put(device, scales), hidden, inner) for _ in range(copies)]
        x, slots = _normal(tokens, hidden), torch.arange(tokens * ranks, dtype=torch.int32).view(tokens, ranks) % count
        return [partial(_outputs, device, device.bring(x), device.bring(slots), experts) for experts in held]

    return Workload(what, count * weights, *_products(tokens, tokens * ranks * weights), make)


def _outputs(device: Device, x: Tensor, slots: Tensor, held: ExpertSlots) -> Tensor:
    outputs = torch.empty(*slots.shape, held.hidden, device=device.place)
    device.ops.apply(x, slots, held, outputs)
    return outputs


def _attention(what: str, spec: ModelSpec, tokens: int, before: int) -> Workload:
    heads, kv_heads, dim = spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim
    seen = before + tokens

    def make(device: Device, copies: int) -> list[Run]:
        states = DeviceStates(spec, KVFormat.BF16, device.memory, layers=1, sequences=copies, context=seen)
        counts = enumerate((heads, kv_heads, kv_heads))
        given = [device.bring(_normal(tokens, count, dim, seed=seed)) for seed, count in counts]
        kept = [device.bring(_normal(before, kv_heads, dim, seed=seed)) for seed in (3, 4)]
        return [partial(device.ops.attention, *given, _cache(states, kept, tokens)) for _ in range(copies)]

    operations = 4 * heads * dim * sum(range(before + 1, seen + 1))
    return Workload(what, seen * 2 * kv_heads * dim * 2, operations, FLOAT32, make)


def _cache(states: DeviceStates, kept: Sequence[Tensor], tokens: int) -> KVCache:
    """Keys and values [S, kv heads, d] of what came before, and room for so many more tokens."""
    cache = states.new_state(0)
    assert isinstance(cache, KVCache)
    cache.reserve(len(kept[0]))
    cache.write(*kept)
    cache.passed(len(kept[0]))
    cache.reserve(tokens)
    return cache


def _delta(what: str, spec: GatedDeltaSpec, tokens: int) -> Workload:
    heads, key_dim, value_dim = spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
    widths = spec.conv_dim, heads * value_dim, heads, heads

    def make(device: Device, copies: int) -> list[Run]:
        shapes = (spec.conv_dim, spec.conv_kernel), (heads,), (heads,), (value_dim,)
        weights = DeltaWeights(*(device.bring(_normal(*shape, seed=1).to(BF16)) for shape in shapes), EPS)
        inputs = DeltaInputs(*(device.bring(_normal(tokens, width, seed=width)) for width in widths))
        states = [_state(device, spec, tokens) for _ in range(copies)]
        return [partial(device.ops.gated_delta, inputs, weights, state) for state in states]

    state = heads * key_dim * value_dim
    if tokens == 1:
        return Workload(what, 2 * 4 * state, 8 * state, FLOAT32, make)
    # A chunk's products among its tokens, the inverse of a triangle, and what meets the state: see `delta_chunk`.
    chunk = CHUNK * CHUNK * (2 * key_dim + 2 * value_dim + CHUNK / 3) + 3 * CHUNK * key_dim * value_dim
    moved = 4 * tokens * (spec.conv_dim + 2 * heads * value_dim) + 2 * 4 * state
    return Workload(what, moved, 2 * heads * chunk * tokens / CHUNK, FLOAT32, make)


def _state(device: Device, spec: GatedDeltaSpec, tokens: int) -> DeltaState:
    """Of a sequence in its middle, which so many tokens advance next."""
    state = DeltaState(spec)
    state.conv, state.recurrent = (_put(device, _normal(*part.shape, seed=2)) for part in (state.conv, state.recurrent))
    state.reserve(tokens)
    return state


def _products(vectors: int, count: float) -> tuple[float, str]:
    """Operations of so many multiply-adds with E4M3 weights, and what does them."""
    return (2 * count, FLOAT32) if vectors <= FEW else (2 * PASSES * count, TENSOR_CORES)


def _normal(*shape: int, seed: int = SEED) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _codes(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).bitwise_and_(NOT_NAN)


def _scales(*shape: int) -> Tensor:
    """Of eight octaves, and such that a product has about the size of what is multiplied."""
    octaves = torch.randint(-16, -8, shape, generator=torch.Generator().manual_seed(SEED))
    return torch.exp2(octaves.float()).to(BF16)


def _put(device: Device, tensor: Tensor) -> Tensor:
    """A copy of its own, where none is in the way of another."""
    return device.memory.put("measured", tensor)
