"""A step of decoding: vectors of several sequences in company get the bits that each has alone, weights of any kind."""

import numpy as np
import pytest

from mosaic import _native
from native.test_matrix import WEIGHTS, expert_weights, inputs, linear, mixed, routing

COMPANY = range(1, 10)  # more than two times as many as kernels take at once
SHAPES = [(1, 1), (3, 17), (130, 200), (257, 64), (64, 513), (150, 1100), (40, 8300)]  # the last are cut to be cached
pytestmark = pytest.mark.parametrize("isa", _native.isas())


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request):
    before = _native.threads()
    _native.set_threads(request.param)
    yield
    _native.set_threads(before)


def step(matrices, x, isa, bf16):
    """X [B, K] as a token of each of B sequences."""
    outputs = [np.full((len(x), 1, matrix.shape[0]), np.nan, np.float32) for matrix in matrices]
    _native.linear(matrices, x[:, None], outputs, bf16, isa)
    return [output[:, 0] for output in outputs]


def alone(compute, rows):
    """The results of the rows [B, ..], each computed by itself."""
    return np.concatenate([compute(slice(row, row + 1)) for row in range(rows)])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_linear(kind, shape, bf16, isa):
    matrix, _ = WEIGHTS[kind](shape)
    x = inputs((max(COMPANY), shape[1]))
    expected = alone(lambda row: linear(matrix, x[row], isa, bf16), len(x))
    for count in COMPANY:
        (found,) = step([matrix], x[:count], isa, bf16)
        assert np.array_equal(found, expected[:count])


@pytest.mark.parametrize("bf16", [False, True])
def test_several_matrices_at_once(bf16, isa):
    matrices = [make((rows, 200), rows)[0] for rows, make in zip((300, 5, 64, 130), WEIGHTS.values(), strict=True)]
    x = inputs((7, 200))
    for matrix, found in zip(matrices, step(matrices, x, isa, bf16), strict=True):
        assert np.array_equal(found, alone(lambda row, weight=matrix: linear(weight, x[row], isa, bf16), len(x)))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 3e38])
def test_what_one_sequence_makes_of_its_numbers_is_its_own(special, isa):
    """All codes occur, the rare ones too, which some kernels see to one by one."""
    matrix, _ = WEIGHTS["e4m3"]((64, 256))
    x = inputs((6, 256))
    expected = alone(lambda row: linear(matrix, x[row], isa), len(x))
    x[2, 5] = special
    (found,) = step([matrix], x, isa, bf16=False)
    others = np.arange(len(x)) != 2
    assert np.array_equal(found[others], expected[others])
    assert np.array_equal(found[2], linear(matrix, x[2:3], isa)[0], equal_nan=True)


def test_prompts_of_several_sequences_are_multiplied_as_one(isa):
    matrix, _ = WEIGHTS["e4m3"]((130, 200))
    x = inputs((15, 200))
    y = np.full((3, 5, 130), np.nan, np.float32)
    _native.linear([matrix], x.reshape(3, 5, 200), [y], False, isa)
    assert np.array_equal(y.reshape(15, 130), linear(matrix, x, isa))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 40), (128, 200)])
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_experts(kind, hidden, inner, bf16, isa):
    """Of 5 experts each of up to 9 sequences uses 3: most are shared, one by more than kernels take at once."""
    experts, _ = expert_weights(5, hidden, inner, kind)
    slots, weights = routing(max(COMPANY), 5, 3)
    slots[:, 1] = np.where((slots == 4).any(axis=1), slots[:, 1], 4)
    x = inputs((max(COMPANY), hidden))
    assert np.unique(slots, return_counts=True)[1].max() > 4
    expected = alone(lambda row: mixed(experts, slots[row], weights[row], x[row], isa, bf16), len(x))
    for count in COMPANY:
        part = slice(0, count)
        found = mixed(experts, slots[part, None], weights[part, None], x[part, None], isa, bf16)
        assert np.array_equal(found[:, 0], expected[part])


@pytest.mark.parametrize("bf16", [False, True])
def test_experts_of_different_kinds_in_parts(bf16, isa):
    """As they arrive: E4M3 and bfloat16, of different sizes, some that no sequence uses now."""
    experts = expert_weights(3, 128, 192, "e4m3")[0] + expert_weights(3, 128, 72, "bf16")[0]
    slots, weights = routing(6, 6, 4)
    x = inputs((6, 128))
    expected = alone(lambda row: mixed(experts, slots[row], weights[row], x[row], isa, bf16), len(x))
    outputs = np.full((6, 1, 4, 128), np.nan, np.float32)
    for there in ([4], [0, 5, 1], [3, 2]):
        places = np.full(6, -1, np.int32)
        places[there] = np.arange(len(there))
        before = outputs.copy()
        chosen = slots[:, None]
        _native.apply_experts([experts[i] for i in there], places[chosen], x[:, None], outputs, bf16, isa)
        untouched = ~np.isin(chosen, there)
        assert np.array_equal(outputs[untouched], before[untouched], equal_nan=True)
    y = np.full((6, 1, 128), np.nan, np.float32)
    _native.add_outputs(outputs, weights[:, None], y)
    assert np.array_equal(y[:, 0], expected)


def test_no_sequences(isa):
    matrix, _ = WEIGHTS["f32"]((4, 8))
    assert step([matrix], np.zeros((0, 8), np.float32), isa, bf16=False)[0].shape == (0, 4)


def test_shapes_are_checked(isa):
    matrix, _ = WEIGHTS["f32"]((4, 8))
    x, y = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1, 4), np.float32)
    for wrong_x, wrong_y in ((x, y[:, 0]), (x[:, 0], y), (x, y[:1]), (x[None], y[None]), (x[..., :4].copy(), y)):
        with pytest.raises(ValueError, match=r"expected (shape|two or three)"):
            _native.linear([matrix], wrong_x, [wrong_y], False, isa)
    experts, _ = expert_weights(1, 128, 128, "bf16")
    x, slots, shares = np.zeros((2, 1, 128), np.float32), np.zeros((2, 1, 1), np.int32), np.ones((2, 1, 1), np.float32)
    for wrong in ((slots[:, 0], shares, x), (slots, shares[:, 0], x), (slots[:1], shares, x), (slots, shares, x[0, 0])):
        with pytest.raises(ValueError, match=r"expected (shape|two or three)"):
            mixed(experts, *wrong, isa)
    for outputs in (np.zeros((2, 1, 128), np.float32), np.zeros((2, 2, 1, 128), np.float32)):
        with pytest.raises(ValueError, match="expected shape"):
            _native.apply_experts(experts, slots, x, outputs, False, isa)
