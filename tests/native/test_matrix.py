"""Matrix products and experts on every ISA of this machine against float64; company and threads change no bit."""

import ml_dtypes
import numpy as np
import pytest

from mosaic import _native
from mosaic.format import e4m3

BF16 = ml_dtypes.bfloat16
EPSILON = 2.0**-24
pytestmark = pytest.mark.parametrize("isa", _native.isas())


@pytest.fixture(autouse=True)
def threads():
    before = _native.threads()
    yield
    _native.set_threads(before)


def e4m3_weight(shape, seed=0, scale_dtype=BF16, codes=None):
    """A matrix of random codes (none NaN) and scales that differ widely, and its exact values."""
    rng = np.random.default_rng(seed)
    if codes is None:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[(codes & 0x7F) == e4m3.NAN_CODE] = 0x2A
    scales = np.exp2(rng.uniform(-12, 4, e4m3.grid(shape))).astype(np.float32).astype(scale_dtype)
    spread = scales.astype(np.float64).repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    stored = scales.view(np.uint16) if scale_dtype == BF16 else scales
    return _native.Matrix(codes, stored), e4m3.decode(codes).astype(np.float64) * spread


def plain_weight(shape, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)
    return _native.Matrix(values.view(np.uint16) if dtype == BF16 else values), values.astype(np.float64)


WEIGHTS = {
    "e4m3": e4m3_weight,
    "e4m3, float32 scales": lambda shape, seed=0: e4m3_weight(shape, seed, np.float32),
    "bf16": lambda shape, seed=0: plain_weight(shape, BF16, seed),
    "f32": lambda shape, seed=0: plain_weight(shape, np.float32, seed),
}


def inputs(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(matrix, x, isa, bf16=False):
    y = np.full((x.shape[0], matrix.shape[0]), np.nan, np.float32)
    _native.linear([matrix], x, [y], bf16, isa)
    return y


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_several_matrices_at_once(tokens, isa, bf16):
    """Each as it would be alone, whatever the others are stored in."""
    weights = [make((rows, 200), rows)[0] for rows, make in zip((300, 5, 64, 130), WEIGHTS.values(), strict=True)]
    x = inputs((tokens, 200))
    outputs = [np.full((tokens, weight.shape[0]), np.nan, np.float32) for weight in weights]
    _native.linear(weights, x, outputs, bf16, isa)
    for weight, output in zip(weights, outputs, strict=True):
        assert np.array_equal(output, linear(weight, x, isa, bf16))


def rounding(values, x, relative):
    """A bound on the error of each output: so much of the sum of absolute products."""
    return relative * (np.abs(x.astype(np.float64)) @ np.abs(values).T)


def float32_bound(columns):
    """Each product passes through at most K / 4 + 8 additions in a lane of a 4-wide register, and a scaling."""
    return (columns / 4 + 16) * EPSILON


SHAPES = [(1, 1), (3, 17), (128, 128), (130, 200), (257, 64), (64, 513), (192, 1024), (96, 130)]


@pytest.mark.parametrize("tokens", [1, 2, 16, 33])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_linear(kind, shape, tokens, isa):
    matrix, values = WEIGHTS[kind](shape)
    x = inputs((tokens, shape[1]))
    error = np.abs(linear(matrix, x, isa) - x.astype(np.float64) @ values.T)
    assert np.all(error <= rounding(values, x, float32_bound(shape[1])))


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_with_rounded_activations(shape, tokens, isa):
    """As exact as float32 on activations that were rounded to bfloat16 before; vdpbf16ps rounds once more per pair."""
    matrix, values = e4m3_weight(shape)
    x = inputs((tokens, shape[1])).astype(BF16).astype(np.float32)
    error = np.abs(linear(matrix, x, isa, bf16=True) - x.astype(np.float64) @ values.T)
    assert np.all(error <= rounding(values, x, 2 * float32_bound(shape[1])))
    rough = inputs((tokens, shape[1]))
    error = np.abs(linear(matrix, rough, isa, bf16=True) - rough.astype(np.float64) @ values.T)
    assert np.all(error <= rounding(values, rough, 2.0**-8))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
def test_every_code_is_decoded_exactly(tokens, bf16, isa):
    """Row r holds code r at one place and 0 elsewhere, at each place of a group once."""
    for place in range(128):
        codes = np.zeros((256, 128), np.uint8)
        codes[:, place] = np.arange(256)
        matrix = _native.Matrix(codes, np.ones((2, 1), np.float32))
        x = np.ones((tokens, 128), np.float32)
        expected = np.broadcast_to(e4m3.VALUES, (tokens, 256))
        assert np.array_equal(linear(matrix, x, isa, bf16), expected, equal_nan=True)


def test_values_stay_where_their_scale_is(isa):
    """A mix-up of blocks or places would show: every block has a scale and every place an activation of its own."""
    codes = np.full((256, 384), 0x38, np.uint8)  # 1.0
    scales = np.exp2(np.arange(6, dtype=np.float32)).reshape(2, 3)
    x = np.exp2(-(np.arange(384) // 128) * 8 - np.arange(384) % 4).astype(np.float32)[None]
    expected = (scales.astype(np.float64) @ x.reshape(3, 128).sum(axis=1, dtype=np.float64)).repeat(128)
    assert np.allclose(linear(_native.Matrix(codes, scales), x, isa)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_company_changes_no_bit(kind, bf16, isa):
    """Nor do threads, of which there may be more than cores. One token alone is another kernel: decode."""
    matrix, _ = WEIGHTS[kind]((320, 640))
    x = inputs((400, 640))
    whole = linear(matrix, x, isa, bf16)
    for first, count in ((0, 2), (7, 15), (100, 16), (3, 17), (190, 48), (31, 65), (0, 193), (5, 300)):
        assert np.array_equal(linear(matrix, x[first : first + count], isa, bf16), whole[first : first + count])
    alone = linear(matrix, x[:1], isa, bf16)
    for count in (1, 2, 3):
        _native.set_threads(count)
        assert np.array_equal(linear(matrix, x, isa, bf16), whole)
        assert np.array_equal(linear(matrix, x[:1], isa, bf16), alone)


# --- experts ----------------------------------------------------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def expert_weights(count, hidden, inner, kind):
    """Experts of moderate size: their values are drawn near 1 / sqrt(columns)."""
    rng = np.random.default_rng(5)
    made, exact = [], []
    for _ in range(count):
        parts = []
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
            values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
            if kind == "e4m3":
                padded = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), np.float32)
                padded[:rows, :columns] = values
                codes, scales = e4m3.quantize(padded)
                values = e4m3.dequantize(codes, scales)[:rows, :columns]
                codes = np.ascontiguousarray(codes[:rows, :columns])
                parts.append((_native.Matrix(codes, scales.view(np.uint16)), values.astype(np.float64)))
            else:
                rounded = values.astype(BF16)
                parts.append((_native.Matrix(rounded.view(np.uint16)), rounded.astype(np.float64)))
        made.append(_native.Expert(*(matrix for matrix, _ in parts)))
        exact.append([values for _, values in parts])
    return made, exact


def mixed(experts, slots, weights, x, isa, bf16=False):
    y = np.full(x.shape, np.nan, np.float32)
    _native.mix_experts(experts, slots, weights, x, y, bf16, isa)
    return y


def expected_mix(exact, slots, weights, x):
    result = np.zeros(x.shape)
    for token, (row, shares) in enumerate(zip(slots, weights, strict=True)):
        for slot, share in zip(row, shares, strict=True):
            gate, up, down = exact[slot]
            vector = x[token].astype(np.float64)
            result[token] += share * ((silu(gate @ vector) * (up @ vector)) @ down.T)
    return result


def routing(tokens, count, ranks, seed=0):
    rng = np.random.default_rng(seed)
    slots = np.array([rng.permutation(count)[:ranks] for _ in range(tokens)], np.int32)
    return slots, rng.random((tokens, ranks)).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 2, 17, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 40), (128, 200)])
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_experts(kind, hidden, inner, tokens, isa):
    """Against float64. Outputs are of size 1, and so are the partial sums on the way to them.

    A sum of up to 256 products has at most 80 roundings of 2^-24 in a row, which by chance come to 9: 5e-7 of size 1,
    in each of three products in a row, for three experts: 3e-6, and the largest of 20,000 outputs is off by five times
    that. Rounding to bfloat16, 2^-9 / sqrt(3) of each term, gives 1e-3 by chance in each product: 4e-3, and 0.02.
    """
    experts, exact = expert_weights(7, hidden, inner, kind)
    slots, weights = routing(tokens, 7, 3)
    x = inputs((tokens, hidden))
    expected = expected_mix(exact, slots, weights, x)
    assert np.allclose(mixed(experts, slots, weights, x, isa), expected, rtol=0, atol=2e-5)
    assert np.abs(mixed(experts, slots, weights, x, isa, bf16=True) - expected).max() < 0.05  # twice that


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_experts_in_any_company(kind, bf16, isa):
    experts, _ = expert_weights(6, 128, 192, kind)
    slots, weights = routing(300, 6, 4)
    x = inputs((300, 128))
    whole = mixed(experts, slots, weights, x, isa, bf16)
    for first, count in ((0, 2), (5, 16), (17, 33), (0, 220)):
        part = slice(first, first + count)
        assert np.array_equal(mixed(experts, slots[part], weights[part], x[part], isa, bf16), whole[part])
    one = slice(4, 5)
    alone = mixed(experts, slots[one], weights[one], x[one], isa, bf16)
    for count in (1, 2, 3):
        _native.set_threads(count)
        assert np.array_equal(mixed(experts, slots, weights, x, isa, bf16), whole)
        assert np.array_equal(mixed(experts, slots[one], weights[one], x[one], isa, bf16), alone)


@pytest.mark.parametrize("bf16", [False, True])
def test_experts_of_different_inner_sizes(isa, bf16):
    """Each contributes what it would alone, to the bit: products and sums are rounded one by one."""
    experts = expert_weights(2, 128, 96, "e4m3")[0] + expert_weights(1, 128, 300, "e4m3")[0]
    x, weights = inputs((40, 128)), np.abs(inputs((40, 2), seed=4))
    slots = np.tile(np.array([1, 2], np.int32), (40, 1))
    for tokens in (slice(0, 1), slice(0, 40)):
        first = np.zeros_like(slots[tokens, :1])
        expected = sum(
            mixed([experts[slot]], first, weights[tokens, rank : rank + 1].copy(), x[tokens], isa, bf16)
            for rank, slot in enumerate((1, 2))
        )
        found = mixed(experts, slots[tokens], weights[tokens], x[tokens], isa, bf16)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_experts_in_parts_give_the_same_bits(tokens, bf16, isa):
    """Whichever are there are applied, the others later; what was not asked for is not touched."""
    experts, _ = expert_weights(6, 128, 192, "e4m3")
    slots, weights = routing(tokens, 6, 4)
    x = inputs((tokens, 128))
    whole, outputs = mixed(experts, slots, weights, x, isa, bf16), np.full((tokens, 4, 128), np.nan, np.float32)
    for there in ([4], [], [0, 5, 1], [3, 2]):
        places = np.full(6, -1, np.int32)
        places[there] = np.arange(len(there))
        before = outputs.copy()
        _native.apply_experts([experts[i] for i in there] or experts[:1], places[slots], x, outputs, bf16, isa)
        assert np.array_equal(outputs[~np.isin(slots, there)], before[~np.isin(slots, there)], equal_nan=True)
    y = np.full(x.shape, np.nan, np.float32)
    _native.add_outputs(outputs, weights, y)
    assert np.array_equal(y, whole)


# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_route(normalize, isa):
    logits = (inputs((50, 33)) * 8).round(1)  # with ties
    experts, weights = np.empty((50, 5), np.int64), np.empty((50, 5), np.float32)
    _native.route(logits, None, normalize, experts, weights)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    assert np.array_equal(experts, expected)
    shares = np.exp(logits.astype(np.float64))
    chosen = np.take_along_axis(shares, expected, 1)
    assert np.allclose(weights, chosen / (chosen if normalize else shares).sum(1, keepdims=True), rtol=1e-6)


def test_route_to_a_shared_expert(isa):
    logits, shared = inputs((70, 9)), inputs((70, 1), seed=2) * 10
    experts, weights = np.empty((70, 4), np.int64), np.empty((70, 4), np.float32)
    _native.route(logits, shared, True, experts, weights)
    own_experts, own_weights = np.empty((70, 3), np.int64), np.empty((70, 3), np.float32)
    _native.route(logits, None, True, own_experts, own_weights)
    assert np.array_equal(experts[:, :3], own_experts)
    assert np.array_equal(weights[:, :3], own_weights)
    assert np.all(experts[:, 3] == 9)
    assert np.allclose(weights[:, 3:], 1 / (1 + np.exp(-shared.astype(np.float64))), rtol=1e-6)


# --- bad arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "scales", "shown"),
    [
        (np.zeros((4, 4), np.uint8), None, "scales belong"),
        (np.zeros((4, 4), np.float32), np.zeros((1, 1), np.float32), "scales belong"),
        (np.zeros((4, 4), np.uint8), np.zeros((1, 2), np.float32), "one for each"),
        (np.zeros((4, 4), np.uint8), np.zeros((1, 1), np.float64), "float32 or uint16"),
        (np.zeros((4, 4), np.float64), None, "expected uint8"),
        (np.zeros(4, np.float32), None, "matrix"),
        (np.zeros((4, 0), np.float32), None, "empty"),
        (np.zeros((4, 8), np.float32)[:, ::2], None, "contiguous"),
    ],
)
def test_matrices_are_checked(values, scales, shown, isa):
    with pytest.raises(ValueError, match=shown):
        _native.Matrix(values, scales)


def test_products_are_checked(isa):
    matrix, _ = plain_weight((4, 8), np.float32)
    x, y = np.zeros((2, 8), np.float32), np.zeros((2, 4), np.float32)
    for wrong in (x[:, :4].copy(), x[:1], x.astype(np.float64), x[0]):
        with pytest.raises(ValueError, match=r"x|y"):
            _native.linear([matrix], wrong, [y], isa=isa)
    with pytest.raises(ValueError, match="y"):
        _native.linear([matrix], x, [np.zeros((2, 5), np.float32)], isa=isa)
    for matrices, outputs in (([], []), ([matrix], []), ([matrix, matrix], [y, y]), ([None], [y])):
        with pytest.raises(ValueError, match=r"as many|overlap|None"):
            _native.linear(matrices, x, outputs, isa=isa)
    experts, _ = expert_weights(2, 128, 128, "bf16")
    x = np.zeros((1, 128), np.float32)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="slots"):
            mixed(experts, np.array([[slot]], np.int32), np.ones((1, 1), np.float32), x, isa)
    for slots, shares, shown in (((1, 0), (1, 0), "at least one"), ((1, 1), (1, 2), "weights")):
        with pytest.raises(ValueError, match=shown):
            mixed(experts, np.zeros(slots, np.int32), np.ones(shares, np.float32), x, isa)
    with pytest.raises(ValueError, match="None"):
        mixed([None], np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), x, isa)
    with pytest.raises(ValueError, match="do not fit"):
        _native.Expert(matrix, matrix, matrix)
    for chosen in (0, 4):
        with pytest.raises(ValueError, match="from one"):
            _native.route(
                np.zeros((2, 3), np.float32), None, True, np.zeros((2, chosen), np.int64),
                np.zeros((2, chosen), np.float32),
            )  # fmt: skip
    with pytest.raises(ValueError, match="shared"):
        _native.route(
            np.zeros((2, 3), np.float32), np.zeros((1, 1), np.float32), True, np.zeros((2, 2), np.int64),
            np.zeros((2, 2), np.float32),
        )  # fmt: skip


def test_no_tokens(isa):
    matrix, _ = plain_weight((4, 8), np.float32)
    assert linear(matrix, np.zeros((0, 8), np.float32), isa).shape == (0, 4)
