"""The native block quantiser on every ISA of this machine, against the numpy reference, bit by bit."""

import ml_dtypes
import numpy as np
import pytest

from mosaic import _native
from mosaic.format import e4m3

BF16 = ml_dtypes.bfloat16
LIMIT = e4m3.LARGEST_WEIGHT
SHAPES = [(128, 128), (128, 256), (384, 128), (256, 640)]
pytestmark = pytest.mark.parametrize("isa", _native.isas())


def quantize(weights, isa, limit=LIMIT, candidates=1):
    codes = np.full(weights.shape, 0xAA, np.uint8)
    scales = np.full(e4m3.grid(weights.shape), 0xAAAA, np.uint16)
    bits = weights.view(np.uint16) if weights.dtype == BF16 else weights
    counts, exponents = np.full(128, 3, np.uint64), np.full(256, 4, np.uint64)
    arguments = (bits, codes, scales, counts, exponents, limit, candidates, e4m3.MSE_STEP, isa)
    result = _native.e4m3_quantize(*arguments)
    scales = scales.view(BF16)
    if result is None:
        assert np.all(counts == 3)
        assert np.all(exponents == 4)
        return codes, scales, None
    *errors, least, largest = result
    assert np.array_equal(counts, 3 + np.bincount((codes & 0x7F).ravel(), minlength=128))
    assert np.array_equal(exponents, 4 + np.bincount((scales.view(np.uint16) >> 7).ravel(), minlength=256))
    if scales.size:
        assert (least, largest) == (scales.astype(np.float32).min(), scales.astype(np.float32).max())
    return codes, scales, tuple(errors)


def draw(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape).astype(np.float32)
    place = np.arange(normal.size).reshape(shape) % 16384
    with np.errstate(over="ignore"):
        values = {
            "gauss": normal * np.float32(0.02),
            "heavy": rng.standard_t(1.5, shape).astype(np.float32),
            "spread": normal * np.exp2(rng.integers(-40, 40, shape)).astype(np.float32),
            "tiny": normal * np.float32(1e-41),
            "below the smallest scale": normal * np.float32(2.0**-134),
            "huge": np.clip(normal, -1, 1) * np.float32(3.3e38),
            "zeros": normal * 0,  # of both signs
            "one": np.where(place == 77, normal, np.float32(-0.0)),
            "outlier": normal * np.float32(1e-3)
            + (np.arange(normal.size).reshape(shape) % 16384 == 5) * np.float32(50),
        }[kind]
    return values.astype(np.float32)


KINDS = ["gauss", "heavy", "spread", "tiny", "below the smallest scale", "huge", "zeros", "one", "outlier"]


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_to_the_reference(kind, shape, dtype, isa):
    weights = draw(kind, shape).astype(dtype)
    codes, scales, errors = quantize(weights, isa)
    expected_codes, expected_scales = e4m3.quantize(weights.astype(np.float32))
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scales.view(np.uint16), expected_scales.view(np.uint16))
    assert errors is not None


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_rule_mse_is_bit_equal_to_the_reference(kind, dtype, isa):
    weights = draw(kind, (256, 384), seed=2).astype(dtype)
    codes, scales, errors = quantize(weights, isa, candidates=e4m3.MSE_CANDIDATES)
    expected_codes, expected_scales = e4m3.quantize_mse(weights.astype(np.float32))
    assert np.array_equal(scales.view(np.uint16), expected_scales.view(np.uint16))
    assert np.array_equal(codes, expected_codes)
    _, noise, _, _, amax_noise = errors
    by_amax = quantize(weights, isa)[2]
    assert noise <= amax_noise == by_amax[1]
    assert by_amax[4] == by_amax[1]
    if kind in ("gauss", "heavy"):
        assert noise < 0.99 * amax_noise


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_quotients_that_lie_on_ties(dtype, isa):
    """Every bfloat16 scale mantissa with weights that are exact ties between codes, and their neighbours."""
    values = e4m3.VALUES[1:0x7F]
    ties = (values[1:] + values[:-1]) / 2
    for mantissa in range(128, 256):
        weights = np.zeros((128, 128), np.float32)
        scale = np.float32(mantissa / 128)
        weights[:125] = (ties * scale)[:, None]
        weights[:125, 1::3] = np.nextafter(weights[:125, 1::3], np.float32(np.inf))
        weights[:125, 2::3] = np.nextafter(weights[:125, 2::3], np.float32(0))
        weights[127] = scale * 448
        weights *= np.float32(2.0 ** (mantissa - 200))
        weights = weights.astype(dtype)
        codes, scales, _ = quantize(weights, isa)
        expected_codes, expected_scales = e4m3.quantize(weights.astype(np.float32))
        assert np.array_equal(scales.view(np.uint16), expected_scales.view(np.uint16))
        assert np.array_equal(codes, expected_codes)


@pytest.mark.parametrize("kind", KINDS)
def test_sums(kind, isa):
    weights = draw(kind, (256, 384), seed=3)
    codes, scales, (signal, noise, worst, zeroed, _) = quantize(weights, isa)
    stored = e4m3.dequantize(codes, scales)
    exact, error = weights.astype(np.float64), (stored - weights).astype(np.float64)
    assert worst == np.abs(error).max()
    assert zeroed == np.count_nonzero((stored == 0) & (weights != 0))
    # Squares and sums of 32 of them in float32: 33 roundings of 2^-24 at most for any term, and all terms are positive.
    assert signal == pytest.approx(np.square(exact).sum(), rel=33 * 2**-24)
    assert noise == pytest.approx(np.square(error).sum(), rel=33 * 2**-24)
    if kind == "gauss":  # where many terms are alike, roundings cancel
        assert noise == pytest.approx(np.square(error).sum(), rel=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_isa_counts_the_same(dtype, isa):
    weights = draw("heavy", (256, 640), seed=1).astype(dtype)
    for candidates in (1, e4m3.MSE_CANDIDATES):
        assert quantize(weights, isa, LIMIT, candidates)[2] == quantize(weights, "scalar", LIMIT, candidates)[2]


@pytest.mark.parametrize("place", [(0, 0), (127, 127), (128, 200), (255, 255)])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_what_is_no_number_is_told(dtype, value, place, isa):
    weights = draw("gauss", (256, 256)).astype(dtype)
    weights[place] = value
    assert quantize(weights, isa)[2] is None


def test_the_limit(isa):
    weights = draw("gauss", (128, 128))
    weights[3, 4] = -LIMIT
    assert quantize(weights, isa)[2] is not None
    weights[3, 4] = np.nextafter(np.float32(-LIMIT), np.float32(-np.inf))
    assert quantize(weights, isa)[2] is None


@pytest.mark.parametrize(
    ("weights", "codes", "scales", "shown"),
    [
        ((128, 128), (128, 128), (1, 2), "scales"),
        ((128, 128), (128, 64), (1, 1), "codes"),
        ((128, 130), (128, 130), (1, 2), "whole blocks"),
        ((64, 128), (64, 128), (1, 1), "whole blocks"),
        ((16384,), (16384,), (1,), "whole blocks"),
        ((2, 128, 128), (2, 128, 128), (2, 1), "whole blocks"),
    ],
)
def test_shapes_are_checked(weights, codes, scales, shown, isa):
    with pytest.raises(ValueError, match=shown):
        _native.e4m3_quantize(
            np.zeros(weights, np.float32), np.zeros(codes, np.uint8), np.zeros(scales, np.uint16),
            np.zeros(128, np.uint64), np.zeros(256, np.uint64), LIMIT, isa=isa,
        )  # fmt: skip


@pytest.mark.parametrize(("counts", "exponents", "shown"), [(256, 256, "counts"), (128, 128, "exponents")])
def test_counters_are_checked(counts, exponents, shown, isa):
    with pytest.raises(ValueError, match=shown):
        _native.e4m3_quantize(
            np.zeros((128, 128), np.float32), np.zeros((128, 128), np.uint8), np.zeros((1, 1), np.uint16),
            np.zeros(counts, np.uint64), np.zeros(exponents, np.uint64), LIMIT, isa=isa,
        )  # fmt: skip


def test_empty(isa):
    assert quantize(np.zeros((0, 128), np.float32), isa)[2] == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 255, 65536])
def test_count(count, isa):
    codes = np.random.default_rng(count).integers(0, 256, count).astype(np.uint8)
    codes[: count // 2] = 0x7F  # the same counter again and again
    codes[count // 2 : count // 2 + count // 8] |= 0x80
    counts = np.full(128, 5, np.uint64)
    _native.e4m3_count(codes, counts, isa)
    assert np.array_equal(counts, 5 + np.bincount(codes & 0x7F, minlength=128))


def test_count_checks_its_buffers(isa):
    with pytest.raises(ValueError, match="counts"):
        _native.e4m3_count(np.zeros(4, np.uint8), np.zeros(256, np.uint64), isa)
    with pytest.raises(ValueError, match="uint64"):
        _native.e4m3_count(np.zeros(4, np.uint8), np.zeros(128, np.uint32), isa)


@pytest.mark.parametrize(("candidates", "step"), [(0, 1), (129, 1), (1, 0), (1, 129)])
def test_candidates_are_checked(candidates, step, isa):
    with pytest.raises(ValueError, match="candidates"):
        _native.e4m3_quantize(
            np.zeros((128, 128), np.float32), np.zeros((128, 128), np.uint8), np.zeros((1, 1), np.uint16),
            np.zeros(128, np.uint64), np.zeros(256, np.uint64), LIMIT, candidates, step, isa,
        )  # fmt: skip
