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


def quantize(weights, isa, limit=LIMIT):
    codes = np.full(weights.shape, 0xAA, np.uint8)
    scales = np.full(e4m3.grid(weights.shape), 0xAAAA, np.uint16)
    bits = weights.view(np.uint16) if weights.dtype == BF16 else weights
    return codes, scales.view(BF16), _native.e4m3_quantize(bits, codes, scales, limit, isa)


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


@pytest.mark.parametrize("kind", KINDS)
def test_sums(kind, isa):
    weights = draw(kind, (256, 384), seed=3)
    codes, scales, (signal, noise, worst, zeroed) = quantize(weights, isa)
    stored = e4m3.dequantize(codes, scales)
    exact, error = weights.astype(np.float64), (stored - weights).astype(np.float64)
    assert worst == np.abs(error).max()
    assert zeroed == np.count_nonzero((stored == 0) & (weights != 0))
    # float64 sums of exact squares in another order: some thousand roundings of positive terms.
    assert signal == pytest.approx(np.square(exact).sum(), rel=1e-12)
    assert noise == pytest.approx(np.square(error).sum(), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_isa_counts_the_same(dtype, isa):
    weights = draw("heavy", (256, 640), seed=1).astype(dtype)
    assert quantize(weights, isa)[2] == quantize(weights, "scalar")[2]


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
            np.zeros(weights, np.float32), np.zeros(codes, np.uint8), np.zeros(scales, np.uint16), LIMIT, isa
        )


def test_empty(isa):
    assert quantize(np.zeros((0, 128), np.float32), isa)[2] == (0, 0, 0, 0)
