"""Every operation of ReferenceOps but Gated DeltaNet against float64 numpy. Tolerance: see tests/support/exact.py."""

import itertools

import numpy as np
import pytest
import torch

from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.weights import E4M3Matrix, Expert
from support.exact import EPS, REL, f64, near, normal, sigmoid, silu
from support.experts import Arriving

OPS = ReferenceOps()


# --- matrices ---------------------------------------------------------------------------------------------------------


def code_value(code: int) -> float:
    """E4M3FN by its definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; subnormals m * 2^-9."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


CODE_VALUES = np.array([code_value(code) for code in range(256)])
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def e4m3(rows: int, columns: int, seed: int = 0, scales: torch.dtype = torch.bfloat16) -> E4M3Matrix:
    """Every finite code, under scales that differ by powers of two between neighbouring blocks, about 1/448 in size."""
    generator = np.random.default_rng(seed)
    codes = torch.from_numpy(generator.choice(FINITE, (rows, columns)))
    grid = (-(-rows // 128), -(-columns // 128))
    exponents = np.add.outer(np.arange(grid[0]), 2 * np.arange(grid[1])) % 5 - 10
    return E4M3Matrix(codes, torch.from_numpy(2.0**exponents * generator.uniform(1, 2, grid)).to(scales))


def dense(weight: torch.Tensor | E4M3Matrix) -> np.ndarray:
    """Float64 [N, K] of any weight, element by element: scale of block (i // 128, j // 128)."""
    if isinstance(weight, torch.Tensor):
        return f64(weight)
    rows, columns = np.indices(weight.codes.shape)
    return CODE_VALUES[weight.codes.numpy()] * f64(weight.scales)[rows // 128, columns // 128]


def product_noise(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Two float64 sums of K products, each off by at most K + 1 roundings of the sum of sizes."""
    return 2 * (weight.shape[1] + 1) * EPS * (np.abs(x) @ np.abs(weight).T)


SHAPES = [(128, 128), (130, 257), (1, 1), (127, 128), (128, 127), (129, 1), (1, 300), (256, 384)]


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_e4m3(shape, scales):
    weight = e4m3(*shape, scales=scales)
    x = normal(5, shape[1], seed=1)
    near(OPS.linear(x, weight), f64(x) @ dense(weight).T, product_noise(f64(x), dense(weight)))


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 4096 + 130, 2 * 4096 + 1])
def test_linear_e4m3_with_many_rows(rows):
    weight = e4m3(rows, 130)
    x = normal(2, 130, seed=1)
    near(OPS.linear(x, weight), f64(x) @ dense(weight).T, product_noise(f64(x), dense(weight)))


def test_linear_decodes_every_finite_code():
    codes = torch.from_numpy(FINITE)[:, None]
    weight = E4M3Matrix(codes.contiguous(), torch.tensor([[0.5], [2.0]]))
    expected = CODE_VALUES[FINITE] * np.where(np.arange(254) < 128, 0.5, 2.0)
    assert np.array_equal(f64(OPS.linear(torch.ones(1, 1), weight))[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [3, 4097])
def test_linear_unquantised(dtype, rows):
    weight, x = normal(rows, 70).to(dtype), normal(4, 70, seed=1)
    near(OPS.linear(x, weight), f64(x) @ f64(weight).T, product_noise(f64(x), f64(weight)))


@pytest.mark.parametrize("weight", [e4m3(200, 300), normal(200, 300).bfloat16()], ids=["e4m3", "bf16"])
def test_linear_gives_a_row_the_same_float32_bits_in_any_company(weight):
    """BLAS adds up one row in another order than many, so the last bits of float64 may differ; those of float32 not."""
    x = normal(33, 300, seed=1)
    together = OPS.linear(x, weight)
    for row in range(len(x)):
        assert torch.equal(OPS.linear(x[row : row + 1], weight)[0].float(), together[row].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_embed_is_exact(dtype):
    table = normal(20, 8).to(dtype)
    found = OPS.embed(table[[3, 0, 19, 3]])
    assert np.array_equal(f64(found), f64(table)[[3, 0, 19, 3]])


# --- norms and rotary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rms_norm(offset, size, dtype):
    """All terms positive: nothing cancels but 1 + w, which is exact in float64."""
    x, weight = normal(6, 3, 48, size=size), normal(48, seed=1).to(dtype)
    expected = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-6) * (offset + f64(weight))
    near(OPS.rms_norm(x, weight, 1e-6, offset), expected)


def test_add_rms_norm():
    x, y, weight = normal(3, 24), normal(3, 24, seed=1), normal(24, seed=2)
    total, found = OPS.add_rms_norm(x, y, weight, 1e-6, 1.0)
    near(total, f64(x) + f64(y))
    assert torch.equal(found, OPS.rms_norm(total, weight, 1e-6, 1.0))


def test_rms_norm_of_zeros_is_zero():
    assert not OPS.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6, 1.0).any()


@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (16, 4), (64, 16), (8, 2), (6, 6)])
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_rotate(dim, rotary, theta):
    """Angles up to 262,143 are off by an ulp or two of float64 on either side, and with them the result."""
    positions = torch.tensor([0, 1, 2, 63, 4095, 262143])
    x = normal(6, 3, dim)
    half = rotary // 2
    expected = f64(x).copy()
    for i in range(half):
        angle = positions.numpy().astype(np.float64) * theta ** (-2 * i / rotary)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        expected[..., i] = f64(x)[..., i] * cos - f64(x)[..., i + half] * sin
        expected[..., i + half] = f64(x)[..., i + half] * cos + f64(x)[..., i] * sin
    noise = (4 * EPS * (2 + positions.numpy()))[:, None, None] * np.abs(f64(x)).max()
    found = OPS.rotate(x, positions, rotary, theta)
    near(found, expected, noise)
    assert torch.equal(found[..., rotary:], x[..., rotary:].double())
    assert torch.equal(found[0], x[0].double())


@pytest.mark.parametrize("shape", [(4, 3, 8), (4, 1)], ids=str)
def test_sigmoid_gate(shape):
    x, gate = normal(4, 3, 8) if len(shape) == 3 else normal(4, 8), normal(*shape, seed=1, size=20.0)
    gate[0, 0] = -200.0
    gate[1, 0] = 200.0
    near(OPS.sigmoid_gate(x, gate), f64(x) * sigmoid(f64(gate)))


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "seen"), [(1, 1), (5, 5), (1, 9), (3, 9), (70, 70), (1, 130), (65, 130)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_attention(tokens, seen, heads, kv_heads):
    """A score's noise d*2^-53*|q||k| shifts a probability by as much, relative; then S products are added."""
    dim = 16
    query, key, value = normal(tokens, heads, dim, size=2.0), *(normal(seen, kv_heads, dim, seed=s) for s in (1, 2))
    expected = np.empty((tokens, heads, dim))
    noise = np.empty((tokens, heads, 1))
    for t, h in itertools.product(range(tokens), range(heads)):
        visible = seen - tokens + t + 1
        keys, values = (f64(part)[:visible, h // (heads // kv_heads)] for part in (key, value))
        scores = keys @ f64(query)[t, h] / np.sqrt(dim)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        expected[t, h] = shares @ values
        reach = (np.abs(keys) @ np.abs(f64(query)[t, h])).max()
        noise[t, h] = 8 * EPS * (dim * reach + seen) * np.abs(values).max()
    near(OPS.attend(query, key, value), expected, noise)


def test_attention_with_scores_beyond_exp():
    """Scores of +-10^5 overflow exp; the softmax must not."""
    query, key, value = normal(4, 2, 8, size=300.0), normal(4, 1, 8, seed=1, size=1000.0), normal(4, 1, 8, seed=2)
    found = OPS.attend(query, key, value)
    assert found.isfinite().all()
    assert torch.equal(found[0], value[0].double().expand(2, 8))  # the first token sees itself only


def test_attention_reads_no_future():
    query, key, value = normal(5, 2, 8), normal(9, 1, 8, seed=1), normal(9, 1, 8, seed=2)
    found = OPS.attend(query, key, value)
    key[7:], value[7:] = 1e3, -1e3
    assert torch.equal(OPS.attend(query, key, value)[:3], found[:3])


# --- router and experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_route(normalize, top_k):
    """x and router are small multiples of 1/8, so the logits are exact."""
    generator = np.random.default_rng(0)
    x, router = (torch.from_numpy(generator.integers(-16, 17, shape) / 8).float() for shape in ((50, 24), (8, 24)))
    logits = f64(x) @ f64(router).T
    assert all(len(set(row)) == 8 for row in logits[:10])
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]  # stable: of equals, the lower number
    weights = np.take_along_axis(shares, expected, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    found = OPS.route(OPS.linear(x, router), top_k, normalize, None)
    assert found.experts.dtype == torch.int64
    assert found.experts.tolist() == expected.tolist()
    near(found.weights, weights)


def test_of_equal_logits_the_lower_expert_wins():
    router = torch.tensor([[1.0], [2.0], [2.0], [1.0], [2.0], [0.0]])
    found = OPS.route(torch.tensor([[1.0], [-1.0], [0.0]]) @ router.T, 4, True, None)
    assert found.experts.tolist() == [[1, 2, 4, 0], [5, 0, 3, 1], [0, 1, 2, 3]]
    assert found.weights[2].tolist() == [0.25] * 4
    many = OPS.route(torch.ones(1, 512), 10, True, None)  # sorting algorithms differ by size
    assert many.experts.tolist() == [list(range(10))]


def test_logits_far_below_the_best_still_have_an_order():
    """Shares that underflow to 0 are not equal logits: expert 3 is likelier than 1."""
    found = OPS.route(torch.tensor([[0.0, -1000.0, -2000.0, -900.0]]), 2, True, None)
    assert found.experts.tolist() == [[0, 3]]
    assert found.weights.tolist() == [[1.0, 0.0]]


def test_a_shared_expert_comes_last():
    logits, shared = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    found = OPS.route(logits, 2, False, shared)
    assert found.experts.tolist() == [[1, 2, 3]]
    assert torch.equal(found.weights[:, :2], OPS.route(logits, 2, False, None).weights)
    near(found.weights[:, 2:], 1 / (1 + np.exp(-f64(shared))))


def swiglu_by_hand(x: np.ndarray, matrices: Expert) -> tuple[np.ndarray, np.ndarray]:
    """Result and bound of its error: that of gate(x) and up(x), carried on by silu (|silu'| < 1.1) and by down."""
    gate, up, down = (dense(part) for part in (matrices.gate, matrices.up, matrices.down))
    g, u = x @ gate.T, x @ up.T
    h = silu(g) * u
    bound = REL * np.abs(h) + 1.1 * (product_noise(x, gate) * np.abs(u) + product_noise(x, up) * np.abs(g))
    return h @ down.T, bound @ np.abs(down).T + product_noise(h, down)


def expert_of(number: int, hidden: int = 130, inner: int = 129) -> Expert:
    seeds = (3 * number, 3 * number + 1, 3 * number + 2)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    if number % 3 == 2:
        return Expert(
            *(normal(*shape, seed=seed, size=0.2).bfloat16() for shape, seed in zip(shapes, seeds, strict=True))
        )
    return Expert(*(e4m3(*shape, seed=seed) for shape, seed in zip(shapes, seeds, strict=True)))


@pytest.mark.parametrize("number", [0, 2], ids=["e4m3", "bf16"])
def test_swiglu(number):
    matrices, x = expert_of(number), normal(6, 130, size=0.1)
    expected, bound = swiglu_by_hand(f64(x), matrices)
    near(OPS.swiglu(x, matrices.gate, matrices.up, matrices.down), expected, bound)


def random_routing(tokens: int, experts: int, top_k: int) -> Routing:
    generator = np.random.default_rng(0)
    chosen = np.stack([generator.permutation(experts)[:top_k] for _ in range(tokens)])
    return Routing(torch.from_numpy(chosen), torch.from_numpy(generator.dirichlet(np.ones(top_k), tokens)).float())


def test_experts():
    experts, x = [expert_of(number) for number in range(6)], normal(20, 130, size=0.1)
    routing = random_routing(20, 6, 3)
    expected, bound = np.zeros((20, 130)), np.zeros((20, 130))
    for t, rank in itertools.product(range(20), range(3)):
        y, off = swiglu_by_hand(f64(x)[t : t + 1], experts[routing.experts[t, rank]])
        weight = routing.weights[t, rank].item()
        expected[t] += weight * y[0]
        bound[t] += weight * (off[0] + REL * np.abs(y[0]))
    near(OPS.experts(x, routing, Arriving(experts)), expected, bound)


def test_experts_give_a_row_the_same_float32_bits_in_any_company():
    """As for linear: the order of BLAS shows in float64 at most."""
    experts, x = [expert_of(number) for number in range(6)], normal(20, 130, size=0.1)
    routing = random_routing(20, 6, 3)
    together = OPS.experts(x, routing, Arriving(experts))
    order = torch.from_numpy(np.random.default_rng(1).permutation(20))
    shuffled = OPS.experts(x[order], Routing(routing.experts[order], routing.weights[order]), Arriving(experts))
    assert torch.equal(shuffled.float(), together[order].float())
    for t in range(20):
        own = Routing(routing.experts[t : t + 1], routing.weights[t : t + 1])
        alone = OPS.experts(x[t : t + 1], own, Arriving(experts))[0]
        assert torch.equal(alone.float(), together[t].float())


def test_only_experts_in_use_are_asked_for_and_each_once():
    source = Arriving([expert_of(number) for number in range(5)])
    routing = Routing(torch.tensor([[4, 1], [1, 4], [1, 2]]), torch.full((3, 2), 0.5))
    OPS.experts(normal(3, 130), routing, source)
    assert sorted(source.asked) == [1, 2, 4]


# --- all of them ------------------------------------------------------------------------------------------------------


def test_no_operation_changes_its_arguments():
    matrices, x, head = expert_of(0), normal(4, 130), normal(4, 2, 8)
    calls = [
        (OPS.embed, normal(9, 4)),
        (OPS.linear, x, matrices.gate),
        (OPS.rms_norm, x, normal(130), 1e-6, 1.0),
        (OPS.add_rms_norm, x, normal(4, 130, seed=1), normal(130), 1e-6, 1.0),
        (OPS.rotate, head, torch.arange(4), 4, 1e4),
        (OPS.attend, head, normal(7, 1, 8), normal(7, 1, 8, seed=1)),
        (OPS.sigmoid_gate, x, normal(4, 1)),
        (OPS.linears, x, [matrices.gate, matrices.up]),
        (OPS.route, x, 2, True, normal(4, 1)),
        (OPS.swiglu, x, matrices.gate, matrices.up, matrices.down),
        (OPS.experts, x, random_routing(4, 6, 2), Arriving([expert_of(number) for number in range(6)])),
    ]
    stateful = {"attention", "gated_delta"}
    public = {name for name in vars(ReferenceOps) if not name.startswith("_")} - stateful
    assert {operation.__name__ for operation, *_ in calls} == public
    for operation, *arguments in calls:
        before = [copied(argument) for argument in arguments]
        operation(*arguments)
        for argument, old in zip(arguments, before, strict=True):
            for found, wanted in zip(tensors_of(argument), old, strict=True):
                assert torch.equal(found, wanted), operation.__name__


def tensors_of(argument: object) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list):
        return [tensor for part in argument for tensor in tensors_of(part)]
    return [part for part in getattr(argument, "__dict__", {}).values() if isinstance(part, torch.Tensor)]


def copied(argument: object) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors_of(argument)]
