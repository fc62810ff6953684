"""The E4M3 codec of mosaic._native on every ISA of this machine, against ml_dtypes and torch, bit by bit.

The domain is small, so decoding is tested exhaustively; encoding at every place where a rounding decision changes, and
over random bit patterns. Not the block codec with its scales (tests/format), nor what the bindings refuse.
"""

import ctypes
import platform

import ml_dtypes
import numpy as np
import pytest
import torch

from mosaic import _native

E4M3 = ml_dtypes.float8_e4m3fn
ALL_CODES = np.arange(256, dtype=np.uint8)
FINITE_CODES = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
MAX_FINITE = np.float32(ml_dtypes.finfo(E4M3).max)
LANES = 64  # codes in the widest vector register
GUARD = 64

pytestmark = pytest.mark.parametrize("isa", _native.isas())


def decode(codes, isa):
    out = np.empty(codes.shape, np.float32)
    _native.e4m3_decode(codes, out, isa)
    return out


def encode(values, isa):
    out = np.empty(values.shape, np.uint8)
    _native.e4m3_encode(values, out, isa)
    return out


def expected_codes(values):
    """By ml_dtypes, which overflows to NaN, after clamping; NaN by the rule 0x7F | sign."""
    clamped = np.clip(np.where(np.isnan(values), 0, values), -MAX_FINITE, MAX_FINITE)
    sign = (values.view(np.uint32) >> 24 & 0x80).astype(np.uint8)
    return np.where(np.isnan(values), 0x7F | sign, clamped.astype(E4M3).view(np.uint8))


def assert_encodes(values, isa):
    codes, expected = encode(values, isa), expected_codes(values)
    wrong = np.flatnonzero(codes != expected)
    assert not wrong.size, [(values[i].hex(), hex(codes[i]), hex(expected[i])) for i in wrong[:5]]


def midpoints_and_neighbours():
    """Every value where rounding changes its mind, beyond the largest code too, with the floats on either side."""
    positive = ALL_CODES[:0x7F].view(E4M3).astype(np.float32)
    positive = np.append(positive, np.float32(480))  # the next one, if 0x7F were a number
    middle = (positive[:-1] + positive[1:]) / 2  # exact: both have four significant bits
    values = np.concatenate([middle, positive])
    below, above = (np.nextafter(values, np.float32(limit)) for limit in (-np.inf, np.inf))
    values = np.concatenate([below, values, above])
    return np.concatenate([values, -values])


SPECIALS = np.array(
    [0.0, -0.0, np.inf, -np.inf, 448, -448, 464, -464, 480, 3.4028235e38, -3.4028235e38]
    + [sign * 2.0**exponent for exponent in (-9, -10, -126, -149) for sign in (1, -1)]
    + [1.1754942e-38, -1.1754942e-38],
    np.float32,
)
NANS = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)


class TestDecode:
    @pytest.mark.parametrize("oracle", ["ml_dtypes", "torch"])
    def test_every_code(self, isa, oracle):
        if oracle == "ml_dtypes":
            expected = ALL_CODES.view(E4M3).astype(np.float32)
        else:
            expected = torch.from_numpy(ALL_CODES.copy()).view(torch.float8_e4m3fn).float().numpy()
        values, nan = decode(ALL_CODES, isa), np.isnan(expected)
        assert np.array_equal(values[~nan].view(np.uint32), expected[~nan].view(np.uint32))
        assert np.array_equal(np.isnan(values), nan)
        assert np.array_equal(np.signbit(values), np.signbit(expected))

    def test_every_code_at_every_place_in_a_vector(self, isa):
        codes = np.stack([np.roll(ALL_CODES, shift) for shift in range(LANES)])
        assert np.array_equal(decode(codes, isa).view(np.uint32), decode(ALL_CODES, isa).view(np.uint32)[codes])

    def test_sizes_and_tails(self, isa):
        codes = np.resize(FINITE_CODES, 256)
        expected = codes.view(E4M3).astype(np.float32)
        for size in range(201):
            out = np.full(size + GUARD, np.float32(-12345))
            _native.e4m3_decode(codes[:size], out[:size], isa)
            assert np.array_equal(out[:size].view(np.uint32), expected[:size].view(np.uint32))
            assert (out[size:] == -12345).all()


class TestEncode:
    def test_midpoints_and_neighbours(self, isa):
        assert_encodes(midpoints_and_neighbours(), isa)

    def test_all_bf16(self, isa):
        assert_encodes((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32), isa)

    def test_random_bits(self, isa):
        bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, dtype=np.uint32)
        assert_encodes(bits.view(np.float32), isa)

    def test_random_bits_in_range(self, isa):
        """Uniform over the bits of [2^-12, 512): where all rounding happens."""
        low, high = np.array([2**-12, 512], np.float32).view(np.uint32)
        bits = np.random.default_rng(1).integers(low, high, 1 << 20, dtype=np.uint32)
        bits |= np.random.default_rng(2).integers(0, 2, bits.size, dtype=np.uint32) << 31
        assert_encodes(bits.view(np.float32), isa)

    def test_specials(self, isa):
        assert_encodes(SPECIALS, isa)

    def test_nan_keeps_its_sign(self, isa):
        assert encode(NANS, isa).tolist() == [0x7F, 0xFF] * 3

    def test_inverts_decode(self, isa):
        assert np.array_equal(encode(decode(FINITE_CODES, isa), isa), FINITE_CODES)

    def test_sizes_and_tails(self, isa):
        values = midpoints_and_neighbours()[:200]
        expected = expected_codes(values)
        for size in range(201):
            out = np.full(size + GUARD, 0x5A, np.uint8)
            _native.e4m3_encode(values[:size], out[:size], isa)
            assert np.array_equal(out[:size], expected[:size])
            assert (out[size:] == 0x5A).all()


class TestFloatingPointEnvironment:
    """The bits depend neither on the rounding mode nor on flushing subnormals, which torch users may have set."""

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the constants of fesetround differ elsewhere")
    @pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "toward zero"])
    def test_rounding_mode(self, isa, mode):
        values = np.concatenate([midpoints_and_neighbours(), SPECIALS])
        expected, expected_values = expected_codes(values), decode(ALL_CODES, isa)
        libm, codes, decoded = ctypes.CDLL("libm.so.6"), np.empty(values.shape, np.uint8), np.empty(256, np.float32)
        assert libm.fesetround(mode) == 0
        try:
            _native.e4m3_encode(values, codes, isa)
            _native.e4m3_decode(ALL_CODES, decoded, isa)
        finally:
            libm.fesetround(0)
        assert np.array_equal(codes, expected)
        assert np.array_equal(decoded.view(np.uint32), expected_values.view(np.uint32))

    def test_flushed_subnormals(self, isa):
        values = np.concatenate([midpoints_and_neighbours(), SPECIALS])
        expected, expected_values = expected_codes(values), decode(ALL_CODES, isa)
        codes, decoded = np.empty(values.shape, np.uint8), np.empty(256, np.float32)
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals")
        try:
            _native.e4m3_encode(values, codes, isa)
            _native.e4m3_decode(ALL_CODES, decoded, isa)
        finally:
            torch.set_flush_denormal(False)
        assert np.array_equal(codes, expected)
        assert np.array_equal(decoded.view(np.uint32), expected_values.view(np.uint32))
