"""The CPU operations one by one against the float64 reference, on shapes that a model gives them."""

import numpy as np
import pytest
import torch

from mosaic import _native
from mosaic.format import e4m3
from mosaic.format.errors import InputError
from mosaic.format.spec import GatedDeltaSpec
from mosaic.runtime.kv import KVCache, KVFormat, KVPool
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, Routing
from mosaic.runtime.ops import choice as choice_module
from mosaic.runtime.ops.choice import Activations, OpsName, make_ops
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.profiled import ProfiledOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix, Expert
from support.experts import Arriving
from support.states import append

REFERENCE = ReferenceOps()


@pytest.fixture(params=_native.isas())
def ops(request):
    return CpuOps(isa=request.param)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(rows, columns, seed=0):
    codes, scales = e4m3.quantize((normal(rows, columns, seed=seed) / columns**0.5).numpy())
    return E4M3Matrix(torch.from_numpy(codes), torch.from_numpy(scales.view(np.int16)).view(torch.bfloat16))


def near(found, expected, bound=3e-6):
    """float32 against float64, sums of size 1 of up to 384 terms in lanes of 4.

    96 additions in a row come by chance to 10 roundings of 2^-24, 6e-7; five times that for the largest of all outputs.
    """
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= bound * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", ["e4m3", torch.bfloat16, torch.float16, torch.float32])
def test_linear(kind, tokens, ops):
    weight = quantised(256, 384) if kind == "e4m3" else normal(40, 100, dtype=kind) / 10
    x = normal(tokens, weight.shape[1], seed=1)
    for _ in range(2):  # the second time it is known
        near(ops.linear(x, weight), REFERENCE.linear(x, weight))
    transposed = x.T.contiguous().T
    near(ops.linear(transposed, weight), REFERENCE.linear(x, weight))


def test_a_weight_in_the_place_of_another_is_another(ops):
    """What is known of a weight is known by its address, and it is kept so that nothing else can come there."""
    x = normal(1, 64)
    for seed in range(50):
        weight = normal(32, 64, seed=seed)
        near(ops.linear(x, weight), REFERENCE.linear(x, weight), 1e-5)


def test_the_same_codes_with_other_scales_are_another_weight(ops):
    weight, x = quantised(128, 128), normal(1, 128)
    for factor in (1, 2):
        other = E4M3Matrix(weight.codes, weight.scales * factor)
        near(ops.linear(x, other), REFERENCE.linear(x, other))
        near(ops.swiglu(x, weight, other, weight), REFERENCE.swiglu(x, weight, other, weight))


@pytest.mark.parametrize("tokens", [1, 7])
def test_small_operations(tokens, ops):
    x, gate, weight = normal(tokens, 48), normal(tokens, 48, seed=1), normal(48, seed=2, dtype=torch.bfloat16)
    near(ops.rms_norm(x, weight, 1e-6, 1.0), REFERENCE.rms_norm(x, weight, 1e-6, 1.0))
    arguments = (x, -2 * x, weight, 1e-6, 1.0)
    for found, wanted in zip(ops.add_rms_norm(*arguments), REFERENCE.add_rms_norm(*arguments), strict=True):
        near(found, wanted)
    near(ops.sigmoid_gate(x, gate), REFERENCE.sigmoid_gate(x, gate))
    near(ops.sigmoid_gate(x, gate[:, :1]), REFERENCE.sigmoid_gate(x, gate[:, :1]))
    heads, positions = normal(tokens, 3, 16), torch.arange(5, 5 + tokens)
    near(ops.rotate(heads, positions, 8, 1e4), REFERENCE.rotate(heads, positions, 8, 1e4))
    wide = normal(tokens, 4, 32, seed=3)  # query and gate of a head side by side
    query, _ = wide.chunk(2, dim=-1)
    near(ops.rms_norm(query, weight[:16], 1e-6, 0.0), REFERENCE.rms_norm(query, weight[:16], 1e-6, 0.0))
    near(ops.embed(weight.view(6, 8)), REFERENCE.embed(weight.view(6, 8)))


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_gated_delta(tokens, ops):
    spec = GatedDeltaSpec(2, 4, 16, 8, conv_kernel=4, grouped=False)
    widths = (spec.conv_dim, spec.value_dim, 4, 4)
    inputs = DeltaInputs(*(normal(tokens, width, seed=seed) for seed, width in enumerate(widths)))
    small = (
        normal(spec.conv_dim, 4, seed=5, dtype=torch.bfloat16),
        normal(4, seed=6),
        normal(4, seed=7),
        normal(8, seed=8),
    )
    weights, states = DeltaWeights(*small, eps=1e-6), (DeltaState(spec), DeltaState(spec))
    for state in states:
        state.recurrent.copy_(normal(4, 16, 8, seed=9))
        state.conv.copy_(normal(3, spec.conv_dim, seed=10))
        state.reserve(tokens)
    found, expected = (each.gated_delta(inputs, weights, state)
                       for each, state in zip((ops, REFERENCE), states, strict=True))  # fmt: skip
    near(found, expected)
    near(states[0].recurrent, states[1].recurrent)
    assert torch.equal(states[0].conv, states[1].conv.float())
    assert states[0].position == states[1].position == tokens


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("tokens", [1, 70])
def test_attention(tokens, kv, ops):
    pool = KVPool(2, 24, kv)
    for seed in range(3):  # pages of several sequences lie in turn
        caches = [KVCache(pool) for _ in range(2)]
        for step in range(4):
            for number, cache in enumerate(caches):
                rows = normal(2, 50, 2, 24, seed=100 * seed + 10 * step + number)
                append(cache, *rows)
        query, key, value = normal(tokens, 6, 24, seed=seed), *normal(2, tokens, 2, 24, seed=seed + 50)
        for cache in (*caches, caches[0].fork(67)):
            cache.reserve(tokens)
            near(ops.attention(query, key, value, cache), REFERENCE.attention(query, key, value, cache))


@pytest.mark.parametrize("tokens", [1, 12])
def test_experts(tokens, ops):
    made = [Expert(quantised(128, 256, i), quantised(128, 256, i + 50), quantised(256, 128, i + 99)) for i in range(6)]
    x, router = normal(tokens, 256), normal(6, 256, dtype=torch.bfloat16) / 16
    routing = ops.route(ops.linear(x, router), 3, True, None)
    expected = REFERENCE.route(REFERENCE.linear(x, router), 3, True, None)
    assert torch.equal(routing.experts, expected.experts)
    near(routing.weights, expected.weights)
    source = Arriving(made)
    near(ops.experts(x, routing, source), REFERENCE.experts(x, expected, Arriving(made)))
    assert sorted(source.asked) == sorted(set(routing.experts.flatten().tolist()))
    near(ops.swiglu(x, made[0].gate, made[0].up, made[0].down),
         REFERENCE.swiglu(x, made[0].gate, made[0].up, made[0].down))  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 12])
def test_experts_that_arrive_in_any_order_and_company_give_the_same_bits(tokens, ops):
    made = [Expert(quantised(128, 256, i), quantised(128, 256, i + 50), quantised(256, 128, i + 99)) for i in range(6)]
    x = normal(tokens, 256)
    routing = ops.route(normal(tokens, 6, seed=1), 4, True, None)
    whole = ops.experts(x, routing, Arriving(made))
    for size, seed in ((1, 0), (2, 1), (3, 2), (5, 3)):
        assert torch.equal(ops.experts(x, routing, Arriving(made, size, seed)), whole)
        near(whole, REFERENCE.experts(x, routing, Arriving(made, size, seed)))


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_shared_expert_of_another_size(tokens, ops):
    made = [Expert(quantised(inner, 256, i), quantised(inner, 256, i + 50), quantised(256, inner, i + 99))
            for i, inner in enumerate((128, 128, 128, 192))]  # fmt: skip
    x, router, gate = normal(tokens, 256), normal(3, 256, dtype=torch.bfloat16) / 16, normal(1, 256) / 16
    routing = ops.route(*ops.linears(x, [router]), 2, True, ops.linear(x, gate))
    expected = REFERENCE.route(*REFERENCE.linears(x, [router]), 2, True, REFERENCE.linear(x, gate))
    assert torch.equal(routing.experts, expected.experts)
    near(routing.weights, expected.weights)
    near(ops.experts(x, routing, Arriving(made)), REFERENCE.experts(x, expected, Arriving(made)))


def test_results_lie_apart_while_they_are_held(ops):
    """Large ones take the memory of those that nobody holds any more."""
    weight, x = quantised(1024, 128), normal(600, 128)
    first = ops.linear(x, weight)
    kept, part = first.clone(), first[5:9, 3:]
    for _ in range(3):
        assert ops.linear(-x, weight).data_ptr() != first.data_ptr()
    assert torch.equal(first, kept)
    place = first.data_ptr()
    del first
    assert ops.linear(-x, weight).data_ptr() != place
    assert torch.equal(part, kept[5:9, 3:])
    del part
    assert place in {result.data_ptr() for result in [ops.linear(-x, weight) for _ in range(3)]}


def test_one_expert_twice_for_a_token(ops):
    """A router does not do it, but nothing forbids it."""
    made = Expert(quantised(128, 128), quantised(128, 128, 1), quantised(128, 128, 2))
    x, routing = normal(1, 128), Routing(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0.25, 0.5]]))
    near(ops.experts(x, routing, Arriving([made])), REFERENCE.experts(x, routing, Arriving([made])))


def test_choice(monkeypatch):
    assert isinstance(make_ops(OpsName.REFERENCE, threads=1), ReferenceOps)
    assert isinstance(make_ops(OpsName.CPU, Activations.BF16, 1), CpuOps)
    assert torch.get_num_threads() == 1

    def refuse():
        raise ValueError("the environment variable MOSAIC_ISA is 'x'")

    monkeypatch.setattr(choice_module, "isa", refuse)
    with pytest.raises(InputError, match="kernels"):
        make_ops(OpsName.CPU)


def test_profile():
    """Every operation is passed on and noted, with what it reads."""
    ops, weight, x = ProfiledOps(CpuOps()), quantised(128, 256), normal(1, 256)
    near(ops.linear(x, weight), REFERENCE.linear(x, weight))
    ops.linear(x, weight)
    ops.rms_norm(x, normal(256), 1e-6, 0.0)
    entry = ops.entries["linear 128x256"]
    assert entry.calls == 2
    assert entry.nbytes == 2 * (128 * 256 + 2 * 2)
    assert ops.entries["rms_norm"].nbytes == 0
    lines = list(ops.table(ops.elapsed, 1e9))
    assert [line.split()[0] for line in lines].count("linear") == 1
    assert "between operations" in lines[-1]
    ops.reset()
    assert not ops.entries
