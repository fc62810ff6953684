"""The block codec of mosaic.format against ml_dtypes, torch and exact arithmetic; and the converter's form of it.

Decoding is tested on all 256 codes, encoding wherever a rounding decision changes. Of `quantize` the whole rule of
docs/FORMAT.md section 3 is checked, block by block, on every kind of matrix that has ever broken such a rule.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.convert.quantize import quantize as quantize_into
from mosaic.convert.recipe import ScaleRule
from mosaic.convert.sums import CodeUse, ErrorSums
from mosaic.format import e4m3

ALL_CODES = np.arange(256, dtype=np.uint8)
FINITE_CODES = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]

#: 448 times every positive normal bfloat16, exactly: 8 + 3 significant bits fit a float64.
NORMAL_BF16 = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
REACH = NORMAL_BF16.astype(np.float64) * 448

SHAPES = [(130, 257), (1, 1), (127, 128), (2048, 500), (128, 128), (256, 384)]


def gaussian(rng, shape):
    return rng.standard_normal(shape) * 0.02


def heavy_tailed(rng, shape):
    return rng.standard_t(1.5, shape) * 1e-3


def constant(rng, shape):
    return np.full(shape, rng.standard_normal())


def one_outlier_per_block(rng, shape):
    weights = rng.standard_normal(shape) * 1e-4
    weights[::128, ::128] = 37.5
    return weights


def subnormal(rng, shape):
    return rng.integers(-(2**23) + 1, 2**23, shape) * 2.0**-149


def all_zero(rng, shape):
    return np.zeros(shape)


def negative_zero(rng, shape):
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


def zeros_of_both_signs_among_others(rng, shape):
    return np.where(rng.random(shape) < 0.5, np.copysign(0.0, rng.standard_normal(shape)), rng.standard_normal(shape))


def huge(rng, shape):
    return rng.uniform(-1e38, 1e38, shape)


def tiny(rng, shape):
    return rng.choice([1e-44, -1e-44, 1e-45, 0.0], shape)


def mixed_magnitude(rng, shape):
    return np.exp2(rng.uniform(-130, 120, shape)) * rng.choice([-1, 1], shape)


def at_the_floor(rng, shape):
    """amax around 448 * 2^-126, where the scale stops to shrink."""
    return rng.uniform(-1, 1, shape) * 448 * 2.0**-126 * rng.choice([0.5, 0.99, 1.0, 1.01, 2.0])


def edges_of_scales(rng, shape):
    """Every block's amax is just a scale times 448, or one float32 beside it."""
    weights = rng.uniform(-1, 1, shape) * 1e-3
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            edge = np.float32(REACH[rng.integers(0x3C00, 0x4200) - 0x80])
            weights[i, j] = np.nextafter(edge, np.float32(rng.choice([0, np.inf])) if rng.random() < 2 / 3 else edge)
    return weights


DISTRIBUTIONS = [
    gaussian,
    heavy_tailed,
    constant,
    one_outlier_per_block,
    subnormal,
    all_zero,
    negative_zero,
    zeros_of_both_signs_among_others,
    huge,
    tiny,
    mixed_magnitude,
    at_the_floor,
    edges_of_scales,
]


def draw(distribution, shape, seed):
    return distribution(np.random.default_rng(seed), shape).astype(np.float32)


def blocks(matrix):
    """(grid row, grid column, block) of a matrix, ragged blocks as they are."""
    for i in range(0, matrix.shape[0], 128):
        for j in range(0, matrix.shape[1], 128):
            yield i // 128, j // 128, matrix[i : i + 128, j : j + 128]


def torch_codes(values):
    """E4M3 codes by torch, whose conversion above 464 is NaN in some versions: so clamped first."""
    clamped = torch.from_numpy(np.ascontiguousarray(values, np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


class TestDecode:
    def test_every_code_is_torchs_and_ml_dtypes(self):
        ours = e4m3.decode(ALL_CODES)
        by_torch = torch.from_numpy(ALL_CODES.copy()).view(torch.float8_e4m3fn).float().numpy()
        by_ml_dtypes = ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        finite = (ALL_CODES & 0x7F) != 0x7F
        assert ours.dtype == np.float32
        assert np.array_equal(bits(ours)[finite], bits(by_torch)[finite])
        assert np.array_equal(bits(ours)[finite], bits(by_ml_dtypes)[finite])
        assert np.isnan(ours[~finite]).all()
        assert np.isfinite(ours[finite]).all()

    def test_every_finite_code_by_the_definition(self):
        for code in FINITE_CODES.tolist():
            sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
            value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            assert bits(e4m3.decode(np.uint8(code))) == bits(sign * value), hex(code)

    def test_the_table_cannot_be_written_to(self):
        with pytest.raises(ValueError, match="read-only"):
            e4m3.VALUES[0] = 1.0


class TestEncode:
    def test_midpoints_and_their_neighbours(self):
        positive = e4m3.decode(ALL_CODES[:0x7F])
        middle = (positive[:-1] + positive[1:]) / 2  # exact
        values = np.concatenate([middle, positive])
        below, above = (np.nextafter(values, np.float32(limit)) for limit in (-np.inf, np.inf))
        values = np.concatenate([below, values, above])
        values = np.concatenate([values, -values])
        assert np.array_equal(e4m3.encode(values), torch_codes(values))

    def test_a_tie_goes_to_the_even_code(self):
        values = e4m3.decode(ALL_CODES[:0x7F])
        codes = e4m3.encode((values[:-1] + values[1:]) / 2)
        expected = ALL_CODES[:0x7E] + (ALL_CODES[:0x7E] & 1)
        assert np.array_equal(codes, expected)

    def test_specials(self):
        values = np.array(
            [0.0, -0.0, np.inf, -np.inf, 448, -448, 449, 464, -464, 465, 480, 1e30, -1e30, 2**-10, -(2**-10), 2**-9]
            + [sign * value for value in (1e-38, 1e-45) for sign in (1, -1)],
            np.float32,
        )
        largest, smallest = [0x7E, 0xFE], [0x00, 0x80]
        expected = [*smallest, *largest, *largest, 0x7E, *largest, 0x7E, 0x7E, *largest, *smallest, 0x01]
        assert e4m3.encode(values).tolist() == [*expected, *smallest, *smallest]

    @pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
    def test_nan_becomes_a_nan_code(self):
        nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
        assert ((e4m3.encode(nans) & 0x7F) == 0x7F).all()

    def test_inverts_decode(self):
        assert np.array_equal(e4m3.encode(e4m3.decode(FINITE_CODES)), FINITE_CODES)

    def test_every_bfloat16(self):
        values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        values = values[~np.isnan(values)]
        assert np.array_equal(e4m3.encode(values), torch_codes(values))


def check_rule_amax(weights, codes, scales):
    """docs/FORMAT.md section 3, steps 1 to 3 and what follows from them, with exact arithmetic where it matters."""
    assert codes.dtype == np.uint8
    assert codes.shape == weights.shape
    assert scales.dtype == ml_dtypes.bfloat16
    assert scales.shape == (-(-weights.shape[0] // 128), -(-weights.shape[1] // 128))
    assert not ((codes & 0x7F) == 0x7F).any()
    code_blocks = {(i, j): block for i, j, block in blocks(codes)}
    for i, j, block in blocks(weights):
        found = code_blocks[i, j]
        amax = np.abs(block).max().astype(np.float64)
        scale = NORMAL_BF16[np.searchsorted(REACH, amax)]  # the smallest normal s with s * 448 >= amax
        quotient = block / np.float32(scale)
        assert quotient.dtype == np.float32
        assert np.array_equal(found, torch_codes(quotient)), f"codes of block {i}, {j}"
        nothing_left = not (found & 0x7F).any()
        assert scales[i, j] == (1.0 if nothing_left else scale), f"scale of block {i}, {j}"
        assert np.abs(quotient).max() <= 448
        stored = e4m3.decode(found).astype(np.float64) * np.float64(scales[i, j])
        if nothing_left:
            assert amax <= 2.0**-136  # half the smallest code at the smallest scale
        else:
            assert (np.abs(stored - block) <= 16 * np.float64(scale)).all()
            if scale > NORMAL_BF16[0]:
                assert (found & 0x7F).max() == 0x7E
        assert np.array_equal(np.signbit(stored), np.signbit(block))


class TestQuantize:
    @pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda function: function.__name__)
    @settings(deadline=None, max_examples=8, derandomize=True)
    @given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1))
    def test_rule_amax(self, distribution, shape, seed):
        weights = draw(distribution, shape, seed)
        codes, scales = e4m3.quantize(weights)
        check_rule_amax(weights, codes, scales)
        again_codes, again_scales = e4m3.quantize(e4m3.dequantize(codes, scales))
        assert np.array_equal(again_codes, codes)
        assert np.array_equal(again_scales.view(np.uint16), scales.view(np.uint16))

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_every_shape(self, shape):
        weights = draw(mixed_magnitude, shape, 5)
        check_rule_amax(weights, *e4m3.quantize(weights))

    def test_every_scale_is_the_smallest_that_reaches(self):
        """amax at 448 times every bfloat16, and at the float32 numbers on either side."""
        edges = REACH[REACH < 3.39e38].astype(np.float32)
        for amax in (edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))):
            expected = NORMAL_BF16[np.searchsorted(REACH, amax.astype(np.float64))]
            assert np.array_equal(e4m3.block_scales(amax).view(np.uint16), expected.view(np.uint16))

    def test_a_block_has_a_scale_of_its_own(self):
        weights = np.ones((256, 256), np.float32)
        weights[:128, 128:], weights[128:, :128], weights[128:, 128:] = 2, 4, 8
        scales = e4m3.quantize(weights)[1].astype(np.float32)
        assert (scales / scales[0, 0]).tolist() == [[1, 2], [4, 8]]

    def test_the_fill_of_a_ragged_block_leaves_no_trace(self):
        weights = draw(gaussian, (130, 257), 9)
        codes, scales = e4m3.quantize(weights)
        filled = np.zeros((256, 384), np.float32)
        filled[:130, :257] = weights
        whole_codes, whole_scales = e4m3.quantize(filled)
        assert np.array_equal(codes, whole_codes[:130, :257])
        assert np.array_equal(scales, whole_scales)

    @pytest.mark.parametrize(
        "amax",
        [
            pytest.param(np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max), id="bfloat16"),
            pytest.param(np.float32(e4m3.LARGEST_WEIGHT), id="largest"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_the_largest_weights_do_not_become_infinite(self, amax):
        codes, scales = e4m3.quantize(np.full((128, 128), amax, np.float32))
        assert np.isfinite(e4m3.dequantize(codes, scales)).all()

    def test_the_largest_weight_is_the_last_that_works(self):
        above = np.nextafter(np.float32(e4m3.LARGEST_WEIGHT), np.float32(np.inf))
        codes, scales = e4m3.quantize(np.full((128, 128), above, np.float32))
        with np.errstate(over="ignore"):
            assert not np.isfinite(e4m3.dequantize(codes, scales)).any()


class TestDequantize:
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
    @pytest.mark.parametrize("shape", [(130, 257), (1, 1), (127, 128), (128, 128), (256, 384)], ids=str)
    def test_against_a_loop(self, shape, dtype):
        rng = np.random.default_rng(2)
        codes = rng.choice(FINITE_CODES, shape)
        scales = np.exp2(rng.uniform(-20, 20, (-(-shape[0] // 128), -(-shape[1] // 128)))).astype(dtype)
        expected = [
            [np.float32(e4m3.VALUES[codes[i, j]]) * np.float32(scales[i // 128, j // 128]) for j in range(shape[1])]
            for i in range(shape[0])
        ]
        values = e4m3.dequantize(codes, scales)
        assert values.dtype == np.float32
        assert np.array_equal(bits(values), bits(expected))

    def test_is_exact_with_bfloat16_scales(self):
        codes = np.resize(FINITE_CODES, (128, 128))
        for scale in NORMAL_BF16[0x1000::509]:
            if float(scale) * 448.0 < 3e38:
                values = e4m3.dequantize(codes, np.array([[scale]]))
                exact = e4m3.decode(codes).astype(np.float64) * np.float64(scale)
                assert np.array_equal(values.astype(np.float64), exact)


class TestGrid:
    @pytest.mark.parametrize(
        ("shape", "grid", "whole"),
        [
            ((128, 256), (1, 2), True),
            ((1, 1), (1, 1), False),
            ((129, 128), (2, 1), False),
            ((2048, 500), (16, 4), False),
        ],
    )
    def test_of_matrices(self, shape, grid, whole):
        assert e4m3.grid(shape) == grid
        assert e4m3.whole_blocks(shape) is whole

    @pytest.mark.parametrize("shape", [(128,), (2, 128, 128), (0, 128), ()])
    def test_nothing_but_a_matrix_is_whole_blocks(self, shape):
        assert not e4m3.whole_blocks(shape)


def convert_quantize(weights, rule, sums):
    codes = np.empty(weights.shape, np.uint8)
    return codes, quantize_into(weights, rule, codes, sums, CodeUse())


class TestConverter:
    """mosaic.convert.quantize does the same with native kernels, and counts."""

    @pytest.mark.parametrize("shape", [(128, 128), (256, 384), (128, 1024)], ids=str)
    @pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda function: function.__name__)
    def test_equals_the_reference_bit_by_bit(self, distribution, shape):
        for seed in range(3):
            weights = draw(distribution, shape, seed)
            codes, scales = convert_quantize(weights, ScaleRule.AMAX, ErrorSums())
            expected_codes, expected_scales = e4m3.quantize(weights)
            assert np.array_equal(codes, expected_codes)
            assert scales.dtype == expected_scales.dtype
            assert np.array_equal(scales.view(np.uint16), expected_scales.view(np.uint16))

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda function: function.__name__)
    def test_counts_the_error(self, distribution):
        """Against float64. The converter takes the difference in float32, which costs at most 2^-24 of it."""
        slices = [draw(distribution, (256, 384), seed) for seed in range(3)]
        sums, differences = ErrorSums(), []
        zeroed = 0
        for weights in slices:
            codes, scales = convert_quantize(weights, ScaleRule.AMAX, sums)
            spread = scales.astype(np.float64).repeat(128, 0).repeat(128, 1)
            stored = e4m3.decode(codes).astype(np.float64) * spread
            differences.append(np.abs(stored - weights.astype(np.float64)))
            zeroed += sum(a == 0 and b != 0 for a, b in zip(stored.flat, weights.flat, strict=True))
        signal = sum(float((weights.astype(np.float64) ** 2).sum()) for weights in slices)
        noise = sum(float((difference**2).sum()) for difference in differences)
        largest = max(float(difference.max()) for difference in differences)
        assert sums.count == 3 * 256 * 384
        assert sums.zeroed == zeroed
        assert sums.nonfinite == 0
        # Squares, sums of 32 of them in float32: 33 roundings of 2^-24 at most; one more for the difference, squared.
        assert sums.signal == pytest.approx(signal, rel=33 * 2.0**-24, abs=0)
        assert sums.noise == pytest.approx(noise, rel=35 * 2.0**-24, abs=0)
        assert sums.max_abs_error == pytest.approx(largest, rel=2.0**-23, abs=0)
        assert sums.relative_l2 == pytest.approx((noise / signal) ** 0.5 if signal else 0.0, rel=34 * 2.0**-24)
        if signal and noise:
            assert sums.sqnr_db == pytest.approx(10 * np.log10(signal / noise), abs=1e-5)
        else:
            assert sums.sqnr_db is None

    def test_counts_what_becomes_zero(self):
        weights = np.zeros((128, 128), np.float32)
        weights[0, :4] = [448.0, 2.0**-11, -(2.0**-11), 2.0**-9]
        sums = ErrorSums()
        convert_quantize(weights, ScaleRule.AMAX, sums)
        assert (sums.zeroed, sums.max_abs_error, sums.noise) == (2, 2.0**-11, 2 * 2.0**-22)
