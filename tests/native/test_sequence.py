"""The kernels of mosaic._native that are no matrix products, on every ISA of this machine, against float64 numpy.

Tolerances are in units U = 2^-24, the rounding error of float32: each test says how many roundings it counts.
Where bits must not depend on how work is cut (calls, threads), they are compared as bits.
"""

import ml_dtypes
import numpy as np
import pytest

from mosaic import _native

U = 2.0**-24
F32, F64 = np.float32, np.float64
PAGE = 64
THREADS = (1, 2, 3)

pytestmark = pytest.mark.parametrize("isa", _native.isas())


@pytest.fixture(autouse=True)
def keep_threads():
    before = _native.threads()
    yield
    _native.set_threads(before)


@pytest.fixture
def rng():
    return np.random.default_rng(20250)


def normal(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(F32)


def exact(x):
    return np.asarray(x, F64)


def sigmoid(x):
    e = np.exp(-np.abs(exact(x)))
    return np.where(exact(x) < 0, e, 1) / (1 + e)


def softplus(x):
    return np.maximum(exact(x), 0) + np.log1p(np.exp(-np.abs(exact(x))))


def silu(x):
    return exact(x) * sigmoid(x)


def assert_relative(actual, expected, units, floor=0.0):
    """Within `units` roundings of the expected value, or of `floor` where that is larger."""
    assert actual.dtype == F32
    error = np.abs(exact(actual) - expected)
    bound = units * U * np.maximum(np.abs(expected), floor)
    worst = np.argmax(error - bound)
    assert np.all(error <= bound), (actual.flat[worst], expected.flat[worst], error.flat[worst], bound.flat[worst])


def same_bits(first, second):
    return np.array_equal(first.view(np.uint32), second.view(np.uint32))


class TestExponentials:
    """Through the gates, which give them away: beta is a sigmoid, log_decay is -exp where softplus is a power of 2."""

    def gates(self, a, b, a_log, dt_bias, isa):
        decay, beta = np.empty_like(a), np.empty_like(a)
        _native.delta_gates(a, b, a_log, dt_bias, decay, beta, isa)
        return decay, beta

    def test_exp(self, isa):
        # Polynomial, product of the remainder and last sum: 2 ulp, and a ulp is up to 2 U of the value.
        x = np.linspace(-87.3, 84, 200_003, dtype=F32)
        a = np.full((1, x.size), 64, F32)  # softplus(64) is 64 in float32
        decay, _ = self.gates(a, a, x, np.zeros_like(x), isa)
        assert_relative(decay, -np.exp(exact(x)) * 64, 4)

    def test_exp_at_its_ends(self, isa):
        x = np.array([-np.inf, -3e38, -200, -104.5, 0, 88.7, 89, 3e38, np.inf], F32)
        a = np.zeros((1, x.size), F32)  # softplus(0) is ln 2
        decay, _ = self.gates(a, a, x, np.zeros_like(x), isa)
        assert not np.isnan(decay).any()
        assert np.all(decay[0, :4] == 0)
        assert decay[0, 4] == F32(-np.log(2))
        assert np.isfinite(decay[0, 5])
        assert np.all(decay[0, 6:] == -np.inf)

    def test_sigmoid(self, isa):
        # exp 4, the sum 1, the quotient 1.
        x = np.concatenate([np.linspace(-87, 100, 100_001), [0, -0.0, 1e-30, -1e-30, 3e38]]).astype(F32)
        _, beta = self.gates(x[None], x[None], np.zeros_like(x), np.zeros_like(x), isa)
        assert_relative(beta, sigmoid(x)[None], 7)
        ends = np.array([[-np.inf, -3e38, -110, 200, np.inf]], F32)
        _, beta = self.gates(ends, ends, np.zeros(5, F32), np.zeros(5, F32), isa)
        assert beta.tolist() == [[0, 0, 0, 1, 1]]

    def test_subnormal_sigmoid(self, isa):
        x = np.linspace(-103, -87.4, 1001, dtype=F32)
        _, beta = self.gates(x[None], x[None], np.zeros_like(x), np.zeros_like(x), isa)
        assert np.all(np.abs(exact(beta[0]) - sigmoid(x)) <= 7 * U * sigmoid(x) + 2.0**-149)

    def test_softplus(self, isa):
        # exp 4, sum, quotient and doubling 3, the series 2, last sum 1.
        x = np.concatenate([np.linspace(-87, 60, 100_001), [0, 1e4, 1e30]]).astype(F32)
        decay, _ = self.gates(x[None], x[None], np.zeros_like(x), np.zeros_like(x), isa)
        assert_relative(decay, -softplus(x)[None], 10)

    def test_nan_stays(self, isa):
        x = np.full((1, 17), np.nan, F32)
        for out in self.gates(x, x, np.zeros(17, F32), np.zeros(17, F32), isa):
            assert np.isnan(out).all()

    @pytest.mark.parametrize("tokens", [1, 2, 65])
    @pytest.mark.parametrize("heads", [1, 3, 16, 32, 35])
    def test_rows(self, isa, rng, tokens, heads):
        a, b = normal(rng, tokens, heads, scale=5), normal(rng, tokens, heads, scale=5)
        a_log, bias = normal(rng, heads), normal(rng, heads)
        decay, beta = self.gates(a, b, a_log, bias, isa)
        # softplus 10, exp 4, product 1; the sum a + bias is off by U times its size, which softplus passes on.
        expected = -np.exp(exact(a_log)) * softplus(exact(a) + bias)
        slack = np.exp(exact(a_log)) * sigmoid(exact(a) + bias) * np.abs(exact(a) + bias) * U
        assert np.all(np.abs(exact(decay) - expected) <= 15 * U * np.abs(expected) + slack)
        assert_relative(beta, sigmoid(b), 7)


class TestNorms:
    @pytest.mark.parametrize("columns", [1, 16, 20, 128, 256, 2048])
    @pytest.mark.parametrize("rows", [1, 2, 65])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_rms_norm(self, isa, rng, rows, columns, offset):
        x, weight = normal(rng, rows, columns, scale=3), normal(rng, columns)
        out = np.empty_like(x)
        _native.rms_norm(x, weight, out, 1e-6, offset, isa)
        root = np.sqrt(np.mean(exact(x) ** 2, axis=-1, keepdims=True) + 1e-6)
        # A lane adds at most columns / 16 squares (4 on the narrowest ISA), halved by the root; 6 more roundings. That
        # of offset + weight is of the larger of the two.
        expected, part = exact(x) / root * (offset + exact(weight)), np.abs(exact(x) / root)
        bound = (columns / 32 + 10) * U * np.abs(expected) + U * part * (np.abs(weight) + offset)
        assert np.all(np.abs(exact(out) - expected) <= bound)
        _native.rms_norm(x, weight, x, 1e-6, offset, isa)
        assert same_bits(x, out)

    @pytest.mark.parametrize("rows", [1, 65])
    def test_add_rms_norm(self, isa, rng, rows):
        """The sum in float32, and what rms_norm makes of it."""
        x, y, weight = normal(rng, rows, 2048), normal(rng, rows, 2048), normal(rng, 2048)
        total, out, expected = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        _native.add_rms_norm(x, y, weight, total, out, 1e-6, 1.0, isa)
        _native.rms_norm(x + y, weight, expected, 1e-6, 1.0, isa)
        assert same_bits(total, x + y)
        assert same_bits(out, expected)
        for outputs in ((total, total), (x, out), (total, y), (total[:0], out)):
            with pytest.raises(ValueError, match=r"overlap|elements"):
                _native.add_rms_norm(x, y, weight, *outputs, 1e-6, 1.0, isa)

    def test_rows_with_gaps(self, isa, rng):
        wide, weight = normal(rng, 33, 40), normal(rng, 20)
        out, expected = np.empty((33, 20), F32), np.empty((33, 20), F32)
        _native.rms_norm(wide[:, 20:], weight, out, 1e-6, 1.0, isa)
        _native.rms_norm(wide[:, 20:].copy(), weight, expected, 1e-6, 1.0, isa)
        assert same_bits(out, expected)
        with pytest.raises(ValueError, match="gaps"):
            _native.rms_norm(wide[:, 20:], normal(rng, 10), out, 1e-6, 1.0, isa)

    @pytest.mark.parametrize("columns", [16, 20, 128])
    @pytest.mark.parametrize("rows", [1, 65, 600])
    def test_gated_rms_norm(self, isa, rng, rows, columns):
        x, gate, weight = normal(rng, rows, columns), normal(rng, rows, columns, scale=20), normal(rng, columns)
        results = []
        for threads in THREADS:
            _native.set_threads(threads)
            results.append(np.empty_like(x))
            _native.gated_rms_norm(x, weight, gate, results[-1], 1e-6, isa)
        root = np.sqrt(np.mean(exact(x) ** 2, axis=-1, keepdims=True) + 1e-6)
        assert_relative(results[0], exact(x) / root * weight * silu(gate), columns / 32 + 18)
        assert all(same_bits(results[0], other) for other in results)


class TestElementwise:
    @pytest.mark.parametrize("count", [1, 15, 16, 17, 2048, 70_001])
    def test_gate_and_multiply(self, isa, rng, count):
        a, b = normal(rng, count, scale=10), normal(rng, count, scale=10)
        out = np.empty_like(a)
        _native.sigmoid_gate(a, b, out, isa)
        assert_relative(out, a * sigmoid(b), 8)
        _native.silu_multiply(a, b, out, isa)
        assert_relative(out, silu(a) * b, 9)
        _native.silu_multiply(a, b, b, isa)
        assert same_bits(out, b)

    def test_one_gate_a_row_and_gates_with_gaps(self, isa, rng):
        x, gates = normal(rng, 5, 20), normal(rng, 5, 40)
        out = np.empty_like(x)
        _native.sigmoid_gate(x, gates[:, :1].copy(), out, isa)
        assert_relative(out, x * sigmoid(gates[:, :1]), 8)
        _native.sigmoid_gate(x, gates[:, 20:], out, isa)
        assert_relative(out, x * sigmoid(gates[:, 20:]), 8)


class TestRotate:
    @pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (20, 8), (128, 128), (256, 64), (24, 0)])
    @pytest.mark.parametrize("tokens", [1, 2, 65])
    def test_rotate(self, isa, rng, dim, rotary, tokens):
        x, theta = normal(rng, tokens, 3, dim), 1e7
        positions = rng.integers(0, 262144, tokens)
        out = np.empty_like(x)
        _native.rotate(x, positions, out, rotary, theta, isa)
        half = rotary // 2
        angles = positions[:, None, None] * theta ** (-np.arange(half) * 2 / max(rotary, 1))
        a, b = exact(x[..., :half]), exact(x[..., half:rotary])
        expected = exact(x).copy()
        expected[..., :half] = a * np.cos(angles) - b * np.sin(angles)
        expected[..., half:rotary] = b * np.cos(angles) + a * np.sin(angles)
        # The factors, the products and the sum: 3 roundings of either product, 3 more where nothing is fused.
        size = np.hypot(a, b) * 1.5
        assert np.all(np.abs(out - expected)[..., :half] <= 4 * U * size)
        assert np.all(np.abs(out - expected)[..., half:rotary] <= 4 * U * size)
        assert same_bits(out[..., rotary:], x[..., rotary:])
        _native.rotate(x, positions, x, rotary, theta, isa)
        assert same_bits(x, out)


def conv(x, history, weight, isa):
    out, history = np.empty(x.shape, F32), history.copy()
    _native.causal_conv(x, history, weight, out, isa)
    return out, history


class TestConvolution:
    @pytest.mark.parametrize("taps", [2, 3, 4])
    @pytest.mark.parametrize("channels", [1, 20, 64, 300])
    @pytest.mark.parametrize("tokens", [1, 2, 65])
    def test_against_numpy(self, isa, rng, tokens, channels, taps):
        x, history, weight = normal(rng, tokens, channels), normal(rng, taps - 1, channels), normal(rng, channels, taps)
        out, after = conv(x, history, weight, isa)
        padded = np.concatenate([history, x])
        windows = [exact(padded[i : i + tokens]) * weight[:, i] for i in range(taps)]
        total, size = sum(windows), sum(np.abs(window) for window in windows)
        # 2 taps roundings of the sum of magnitudes, times the slope of silu, which is below 1.1; and silu's own 8.
        assert np.all(np.abs(out - silu(total)) <= U * (2 * taps * 1.1 * size + 8 * np.abs(silu(total))))
        assert same_bits(after, padded[tokens:])

    @pytest.mark.parametrize("taps", [2, 4])
    def test_cuts_do_not_show(self, isa, rng, taps):
        x, history, weight = normal(rng, 130, 1100), normal(rng, taps - 1, 1100), normal(rng, 1100, taps)
        whole, after = conv(x, history, weight, isa)
        for threads in THREADS:
            _native.set_threads(threads)
            again, same = conv(x, history, weight, isa)
            assert same_bits(again, whole)
            assert same_bits(same, after)
        state = history.copy()
        for token in range(130):
            out, state = conv(x[token : token + 1], state, weight, isa)
            assert same_bits(out, whole[token : token + 1])
        assert same_bits(state, after)
        wide = np.concatenate([x, x], axis=1)
        assert same_bits(conv(wide[:, 1100:], history, weight, isa)[0], whole)


def delta_inputs(rng, tokens, key_heads, heads, d_k, d_v, decay=None):
    log_decay = -np.exp(normal(rng, tokens, heads)) if decay is None else np.full((tokens, heads), decay, F32)
    beta = sigmoid(normal(rng, tokens, heads)).astype(F32)
    shapes = (tokens, key_heads, d_k), (tokens, key_heads, d_k), (tokens, heads, d_v)
    return [*(normal(rng, *shape) for shape in shapes), log_decay, beta], normal(rng, heads, d_k, d_v)


def delta(inputs, state, isa):
    out, state = np.empty(inputs[2].shape, F32), state.copy()
    _native.delta_rule(*inputs, state, out, isa)
    return out, state


def delta_exact(inputs, state):
    query, key, value, log_decay, beta = map(exact, inputs)
    repeat, state, outputs = value.shape[1] // key.shape[1], exact(state), []
    query = query / np.sqrt((query**2).sum(-1, keepdims=True) + 1e-6) / np.sqrt(query.shape[-1])
    key = key / np.sqrt((key**2).sum(-1, keepdims=True) + 1e-6)
    for token in range(value.shape[0]):
        q, k = np.repeat(query[token], repeat, 0)[:, :, None], np.repeat(key[token], repeat, 0)[:, :, None]
        state = state * np.exp(log_decay[token])[:, None, None]
        write = beta[token][:, None] * (value[token] - (state * k).sum(1))
        state = state + k * write[:, None, :]
        outputs.append((state * q).sum(1))
    return np.array(outputs), state


def assert_follows(actual, expected):
    """A step adds a few roundings: of the decay 4, of the normalised key and query 4, and of sums over d_k, whose terms
    are of random sign and small beside the state. It keeps earlier errors from growing, as its map of the state has a
    norm of at most 1. So 16 roundings of the largest element, whatever the number of tokens."""
    assert np.abs(actual - expected).max() <= 16 * U * np.abs(expected).max()


class TestDeltaRule:
    @pytest.mark.parametrize("tokens", [1, 2, 63, 65])
    @pytest.mark.parametrize(
        ("key_heads", "heads", "d_k", "d_v"), [(1, 1, 16, 16), (2, 6, 20, 36), (2, 4, 128, 128), (1, 2, 256, 100)]
    )
    def test_against_numpy(self, isa, rng, tokens, key_heads, heads, d_k, d_v):
        inputs, state = delta_inputs(rng, tokens, key_heads, heads, d_k, d_v)
        out, after = delta(inputs, state, isa)
        expected, end = delta_exact(inputs, state)
        assert_follows(out, expected)
        assert_follows(after, end)

    @pytest.mark.parametrize("decay", [0.0, -80.0, -np.inf])
    def test_extreme_decay(self, isa, rng, decay):
        inputs, state = delta_inputs(rng, 3, 1, 2, 128, 128, decay)
        out, after = delta(inputs, state, isa)
        expected, end = delta_exact(inputs, state)
        assert_follows(out, expected)
        assert_follows(after, end)

    def test_silent_key(self, isa, rng):
        inputs, state = delta_inputs(rng, 1, 1, 1, 16, 16)
        inputs[0][:] = inputs[1][:] = 0
        out, after = delta(inputs, state, isa)
        assert not out.any()
        # The decay is off by 2 ulp, its exponent exact; one product.
        assert_relative(after, state * np.exp(exact(inputs[3][0, 0])), 5)

    @pytest.mark.parametrize(("heads", "d_v"), [(8, 128), (2, 200), (3, 20)])
    def test_cuts_do_not_show(self, isa, rng, heads, d_v):
        inputs, state = delta_inputs(rng, 65, 1, heads, 128, d_v)
        _native.set_threads(1)
        whole, after = delta(inputs, state, isa)
        for threads in (2, 3, 5):
            _native.set_threads(threads)
            out, end = delta(inputs, state, isa)
            assert same_bits(out, whole)
            assert same_bits(end, after)
        step = state
        for token in range(65):
            out, step = delta([part[token : token + 1] for part in inputs], step, isa)
            assert same_bits(out, whole[token : token + 1])
        assert same_bits(step, after)

    def test_rows_with_gaps(self, isa, rng):
        mixed = normal(rng, 5, 2 * 16 + 2 * 16 + 4 * 16)
        parts = [part.reshape(5, -1, 16) for part in np.split(mixed, [32, 64], axis=1)]
        assert np.shares_memory(parts[0], mixed)
        inputs, state = delta_inputs(rng, 5, 2, 4, 16, 16)
        out, after = delta([*parts, *inputs[3:]], state, isa)
        expected, end = delta([*(part.copy() for part in parts), *inputs[3:]], state, isa)
        assert same_bits(out, expected)
        assert same_bits(after, end)


class TestGatedDelta:
    @pytest.mark.parametrize("tokens", [1, 3, 64, 130])
    def test_the_same_bits_as_its_parts(self, isa, rng, tokens):
        key_heads, heads, d_k, d_v, taps = 2, 6, 20, 36, 4
        keys, values = key_heads * d_k, heads * d_v
        channels = 2 * keys + values
        qkv, z = normal(rng, tokens, channels), normal(rng, tokens, values)
        b, a = normal(rng, tokens, heads), normal(rng, tokens, heads)
        weights, norm = normal(rng, channels, taps), normal(rng, d_v)
        a_log, dt_bias = normal(rng, heads), normal(rng, heads)
        history, state = normal(rng, taps - 1, channels), normal(rng, heads, d_k, d_v)
        mixed, past = conv(qkv, history, weights, isa)
        parts = [
            part.reshape(tokens, -1, d)
            for part, d in zip(np.split(mixed, [keys, 2 * keys], 1), (d_k, d_k, d_v), strict=True)
        ]
        log_decay, beta = np.empty_like(a), np.empty_like(b)
        _native.delta_gates(a, b, a_log, dt_bias, log_decay, beta, isa)
        read, after = delta([*parts, log_decay, beta], state, isa)
        expected = np.empty_like(z)
        _native.gated_rms_norm(read, norm, z, expected, 1e-6, isa)
        for threads in THREADS:
            _native.set_threads(threads)
            old, end, out = history.copy(), state.copy(), np.full_like(z, np.nan)
            _native.gated_delta(qkv, z, b, a, weights, a_log, dt_bias, norm, old, end, out, 1e-6, isa)
            assert same_bits(out, expected)
            assert same_bits(old, past)
            assert same_bits(end, after)

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("qkv", (2, 7), "whole rows|multiple"),
            ("z", (2, 9), "z has 18 elements, expected 32"),
            ("b", (2, 3), "b has 6 elements, expected 4"),
            ("conv", (16, 1), "taps"),
            ("conv", (17, 4), "channels"),
            ("a_log", (3,), "a_log has 3 elements"),
            ("norm", (5,), "norm has 5 elements"),
            ("history", (4, 16), "history has 64 elements"),
            ("state", (2, 600, 8), "600 dims"),
            ("state", (16, 8), "dimensions"),
            ("out", (2, 15), "out has 30 elements"),
        ],
    )
    def test_shapes_that_do_not_fit_are_refused(self, isa, name, shape, message):
        """One key head, two value heads, keys of 2 and values of 8: 20 channels."""
        shapes = {"qkv": (2, 20), "z": (2, 16), "b": (2, 2), "a": (2, 2), "conv": (20, 4), "a_log": (2,),
                  "dt_bias": (2,), "norm": (8,), "history": (3, 20), "state": (2, 2, 8), "out": (2, 16)}  # fmt: skip
        _native.gated_delta(*(np.zeros(each, F32) for each in shapes.values()), 1e-6, isa)
        shapes[name] = shape
        with pytest.raises(ValueError, match=message):
            _native.gated_delta(*(np.zeros(each, F32) for each in shapes.values()), 1e-6, isa)

    def test_what_is_changed_must_lie_apart(self, isa):
        state = np.zeros((2, 2, 16), F32)
        arrays = [
            np.zeros(shape, F32) for shape in ((2, 36), (2, 32), (2, 2), (2, 2), (36, 4), (2,), (2,), (16,), (3, 36))
        ]
        with pytest.raises(ValueError, match="overlaps"):
            _native.gated_delta(*arrays, state, state.reshape(-1), 1e-6, isa)


class Cache:
    """Pages as mosaic.runtime.kv keeps them, and what they hold as float32 [2, S, kv heads, d]."""

    def __init__(self, rng, seen, kv_heads, dim, kv, rows=None):
        self.kv_heads, self.kv, self.seen = kv_heads, kv, seen
        rows = normal(rng, 2, seen, kv_heads, dim) if rows is None else rows
        count, self.scales = -(-seen // PAGE), None
        padded = np.full((2, count * PAGE, kv_heads, dim), np.nan, F32)  # what was not written must not be used
        padded[:, :seen] = rows
        if kv == "e4m3":
            scales = np.abs(padded).max(-1, keepdims=True) / F32(448)
            stored = (padded / scales).astype(ml_dtypes.float8_e4m3fn)
            self.stored = (stored.astype(F32) * scales)[:, :seen]
            self.scales = self.split(scales)
        else:
            stored = padded.astype(ml_dtypes.bfloat16 if kv == "bf16" else F32)
            self.stored = stored.astype(F32)[:, :seen]
        self.pages = self.split(stored)

    @staticmethod
    def split(padded):
        return [np.ascontiguousarray(page) for page in np.split(padded, padded.shape[1] // PAGE, axis=1)]

    @staticmethod
    def addresses(pages):
        return None if pages is None else np.array([page.ctypes.data for page in pages], np.int64)

    def attend(self, query, isa, seen=None):
        out, seen = np.full(query.shape, np.nan, F32), self.seen if seen is None else seen
        pages, scales = self.addresses(self.pages), self.addresses(self.scales)
        _native.attention(query, pages, scales, out, seen, self.kv_heads, self.kv, isa)
        return out

    def attend_exact(self, query):
        """(result, its bound): see TestAttention."""
        tokens, heads, dim = query.shape
        group, (key, value) = heads // self.kv_heads, exact(self.stored)
        visible = np.arange(self.seen) <= np.arange(self.seen - tokens, self.seen)[:, None]
        result, bound = np.empty(query.shape), np.empty(query.shape)
        for head in range(heads):
            k, v = key[:, head // group], value[:, head // group]
            scores = np.where(visible, exact(query[:, head]) @ k.T / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            result[:, head] = weights @ v
            sizes = np.linalg.norm(exact(query[:, head]), axis=-1)[:, None] * np.linalg.norm(k, axis=-1) / np.sqrt(dim)
            score_error = 2 * U * np.where(visible, sizes, 0).max(-1, keepdims=True)
            bound[:, head] = (2 * score_error + 16 * U) * (weights @ np.abs(v))
        return result, bound


class TestAttention:
    """Bound: roundings of a score's terms have random signs, so the score is off by about one rounding of the product
    of the norms; 2 are allowed. A weight is off, relatively, by as much as its score and the largest one. 16 roundings
    for exp, the sums over positions (of random sign too), merging and the quotient."""

    @pytest.mark.parametrize("kv", ["f32", "bf16", "e4m3"])
    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim", "cuts"),
        [
            (1, 1, 16, [(1, 1), (1, 64), (2, 65), (63, 63), (64, 600), (65, 1030), (130, 130)]),
            (2, 3, 20, [(1, 65), (2, 512), (63, 100), (64, 600), (65, 1030)]),
            (2, 8, 128, [(1, 1030), (2, 513), (65, 65), (130, 130)]),
            (1, 8, 256, [(1, 600), (2, 2), (64, 520)]),
            (2, 1, 68, [(1, 1), (130, 260)]),
        ],
    )
    def test_against_numpy(self, isa, rng, kv, kv_heads, group, dim, cuts):
        for tokens, seen in cuts:
            cache = Cache(rng, seen, kv_heads, dim, kv)
            query = normal(rng, tokens, kv_heads * group, dim)
            expected, bound = cache.attend_exact(query)
            error = np.abs(cache.attend(query, isa) - expected)
            assert np.all(error <= bound), (tokens, seen, (error / bound).max())

    @pytest.mark.parametrize("kv", ["f32", "bf16", "e4m3"])
    @pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 3, 20), (2, 8, 128), (1, 70, 16)])
    def test_cuts_do_not_show(self, isa, rng, kv, kv_heads, group, dim):
        seen, tokens = 1100, 130
        cache, query = Cache(rng, seen, kv_heads, dim, kv), normal(rng, tokens, kv_heads * group, dim)
        whole = cache.attend(query, isa)
        for threads in THREADS:
            _native.set_threads(threads)
            assert same_bits(cache.attend(query, isa), whole)
            assert same_bits(cache.attend(query[-2:], isa), whole[-2:])
        for token in (0, 1, 53, 54, 128, 129):  # positions around the border of a segment among them
            out = cache.attend(query[token : token + 1], isa, seen - tokens + token + 1)
            assert same_bits(out, whole[token : token + 1])

    def test_every_code(self, isa, rng):
        codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
        cache = Cache(rng, 254, 1, 254, "e4m3")
        for page in cache.pages:
            page.view(np.uint8)[:] = 0
        for position in range(254):
            # Keys are such that position i is all that query i sees; its values are all codes, turned by i.
            page, row = cache.pages[position // PAGE].view(np.uint8), position % PAGE
            page[0, row, 0, position] = 0x7E
            page[1, row, 0] = np.roll(codes, position)
            cache.scales[position // PAGE][:, row] = 1 if position % 2 else 0.37
        query = np.eye(254, dtype=F32)[:, None] * 100
        for position in range(254):
            out = cache.attend(query[position : position + 1], isa, position + 1)[0, 0]
            scale = F32(1 if position % 2 else 0.37)
            assert_relative(out, exact(np.roll(codes, position).view(ml_dtypes.float8_e4m3fn).astype(F32) * scale), 2)

    def test_scores_far_apart(self, isa, rng):
        """The largest score in the first, a middle and the last segment; nothing overflows, nothing becomes NaN."""
        for best in (3, 700, 1599):
            rows = normal(rng, 2, 1600, 1, 16)
            rows[0] *= 50
            rows[0, best] = 100
            cache, query = Cache(rng, 1600, 1, 16, "f32", rows), np.full((1, 2, 16), 30, F32)
            expected, bound = cache.attend_exact(query)
            assert np.all(np.abs(cache.attend(query, isa) - expected) <= bound)

    def test_refusals(self, isa, rng):
        cache, query = Cache(rng, 65, 2, 16, "f32"), normal(rng, 2, 4, 16)
        out, pages = np.empty_like(query), cache.addresses(cache.pages)
        for arguments, message in [
            ((query, pages[:1], None, out, 65, 2, "f32"), "pages has 1 elements, expected 2"),
            ((query, pages, None, out, 1, 2, "f32"), "fewer tokens"),
            ((query, pages, None, out, 65, 3, "f32"), "multiple of the KV heads"),
            ((query, pages, None, out, 65, 2, "e4m3"), "scales belong to e4m3"),
            ((query, pages, None, out, 65, 2, "f16"), "kv is 'f16'"),
            ((query, pages.astype(np.uint64), None, out, 65, 2, "f32"), "expected int64"),
            ((query, pages, None, query, 65, 2, "f32"), "overlaps"),
        ]:
            with pytest.raises(ValueError, match=message):
                _native.attention(*arguments, isa)
