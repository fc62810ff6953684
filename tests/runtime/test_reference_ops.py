"""Every operation of ReferenceOps against float64 numpy written from MODEL-SPEC section 3.

Tolerance. Everything is float64, on both sides. An elementwise formula takes some ten roundings of 2^-53 per side, a
mean of at most 48 terms as many again: REL = 2^-46 relative covers 128 of them. Where terms cancel there remains an
absolute noise of 2^-53 per term of the sum of the terms' sizes; `noise` states it per operation. Both are many orders
below one rounding to float32 (2^-24), so a float32 step anywhere in between fails.
"""

import itertools

import numpy as np
import pytest
import torch

from mosaic.runtime.ops import DeltaInputs, Routing
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.weights import E4M3Matrix, Expert

OPS = ReferenceOps()
EPS = 2.0**-53
REL = 128 * EPS
SMALLEST = 2.0**-1074  # subnormal results are rounded to a multiple of this


def f64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def near(found: torch.Tensor, expected: np.ndarray, noise: np.ndarray | float = 0.0) -> None:
    """`expected` up to some roundings of float64 and `noise`."""
    assert found.dtype == torch.float64
    assert tuple(found.shape) == expected.shape
    error = np.abs(f64(found) - expected)
    bound = REL * np.abs(expected) + 4 * SMALLEST + noise
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{error[worst]} > {bound if np.ndim(bound) == 0 else bound[worst]} at {worst}"


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


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
    found = OPS.embed(table, torch.tensor([3, 0, 19, 3]))
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


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_gated_rms_norm(eps):
    """The weight is the gain itself, without offset; the gate goes through silu, down to where sigmoid underflows."""
    x, weight, gate = normal(6, 3, 32, size=0.1), normal(32, seed=1), normal(6, 3, 32, seed=2, size=8.0)
    gate[0, 0, :4] = torch.tensor([0.0, -90.0, 90.0, -1e4])
    expected = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + eps) * f64(weight) * silu(f64(gate))
    near(OPS.gated_rms_norm(x, weight, gate, eps), expected)


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


# --- gated delta net --------------------------------------------------------------------------------------------------


def conv_by_hand(x: np.ndarray, history: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and, for the noise, the sum of the sizes."""
    taps = weight.shape[-1]
    padded = np.concatenate((history, x))
    total, sizes = np.zeros_like(x), np.zeros_like(x)
    for t, j in itertools.product(range(len(x)), range(taps)):
        term = weight[:, 0, j] * padded[t + j]
        total[t] += term
        sizes[t] += np.abs(term)
    return silu(total), sizes


@pytest.mark.parametrize("taps", [2, 4, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("old", [False, True], ids=["first", "later"])
def test_causal_conv(taps, tokens, old):
    """|silu'| < 1.1 carries the noise of the sum on."""
    x, weight = normal(tokens, 10), normal(10, 1, taps, seed=1).bfloat16()
    history = normal(taps - 1, 10, seed=2) if old else torch.zeros(taps - 1, 10)
    found, after = OPS.causal_conv(x, history, weight)
    expected, sizes = conv_by_hand(f64(x), f64(history), f64(weight))
    near(found, expected, 4 * taps * EPS * sizes)
    assert np.array_equal(f64(after), f64(torch.cat((history, x))[tokens:]))


def test_causal_conv_in_pieces_has_the_same_bits():
    """Elementwise sums in the order of the taps: no BLAS, no other order."""
    x, weight, history = normal(12, 10), normal(10, 1, 4, seed=1), normal(3, 10, seed=2)
    whole, end = OPS.causal_conv(x, history, weight)
    parts = []
    for first, last in ((0, 1), (1, 3), (3, 4), (4, 9), (9, 12)):
        part, history = OPS.causal_conv(x[first:last], history, weight)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(history, end)


def test_delta_gates():
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b): from no decay to an underflow of exp(g)."""
    heads = 8
    a, b = normal(50, heads, size=12.0), normal(50, heads, seed=1, size=12.0)
    a[0], b[0] = torch.linspace(-100, 100, heads), torch.linspace(-120, 120, heads)
    a_log, dt_bias = torch.linspace(-5, 5, heads).bfloat16(), torch.linspace(-2, 3, heads).bfloat16()
    log_decay, beta = OPS.delta_gates(a, b, a_log, dt_bias)
    guard = np.exp(f64(a_log)) * np.log1p(np.exp(-20.0))  # torch's softplus is the identity from 20 on
    near(log_decay, -np.exp(f64(a_log)) * np.logaddexp(0, f64(a) + f64(dt_bias)), guard * (f64(a) + f64(dt_bias) > 20))
    near(beta, sigmoid(f64(b)))
    assert (log_decay <= 0).all()
    assert log_decay.min() < -1000


#: Heads of keys and values, d_k, d_v.
DELTA_SHAPES = [(2, 4, 8, 6), (3, 3, 4, 4), (1, 4, 16, 8)]
DECAYS = {
    "normal": lambda generator, shape: -np.exp(generator.uniform(np.log(1e-4), np.log(0.7), shape)),
    # exp(g) of 1, of little, and of 0: exp(-104) is below the smallest float32, exp(-746) below that of float64
    "strong": lambda generator, shape: generator.choice([0.0, -1e-6, -3.0, -104.0, -746.0, -1e4], shape),
}


def delta_inputs(tokens: int, shape: tuple[int, int, int, int], decay: str, seed: int = 0) -> DeltaInputs:
    key_heads, value_heads, d_k, d_v = shape
    generator = np.random.default_rng(seed)
    beta = generator.uniform(0, 1, (tokens, value_heads))
    beta[generator.uniform(size=beta.shape) < 0.2] = 0.0
    beta[generator.uniform(size=beta.shape) < 0.2] = 1.0
    parts = (
        generator.normal(size=(tokens, key_heads, d_k)),
        generator.normal(size=(tokens, key_heads, d_k)) * 3,
        generator.normal(size=(tokens, value_heads, d_v)),
        DECAYS[decay](generator, (tokens, value_heads)),
        beta,
    )
    return DeltaInputs(*(torch.from_numpy(part).float() for part in parts))


def recurrence(inputs: DeltaInputs, state: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """MODEL-SPEC 3.4, token by token and head by head."""
    query, key, value, log_decay, beta = (
        f64(p) for p in (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    )
    tokens, value_heads, d_v = value.shape
    ratio, d_k = value_heads // key.shape[1], key.shape[2]
    out, after = np.empty((tokens, value_heads, d_v)), f64(state).copy()
    for h in range(value_heads):
        memory = after[h]
        for t in range(tokens):
            q, k = query[t, h // ratio], key[t, h // ratio]
            q = q / np.sqrt((q**2).sum() + 1e-6) / np.sqrt(d_k)
            k = k / np.sqrt((k**2).sum() + 1e-6)
            memory = memory * np.exp(log_decay[t, h])
            memory = memory + np.outer(k, beta[t, h] * (value[t, h] - memory.T @ k))
            out[t, h] = memory.T @ q
        after[h] = memory
    return out, after


def delta_noise(inputs: DeltaInputs, state: torch.Tensor) -> float:
    """The rule contracts (unit keys, beta and decay in 0..1), so state and output stay below |S0| + T max|v| sqrt(d).

    Each token adds some (d_k + T) float64 roundings of that size, on either side. The chunk form also takes differences
    of the cumulated log-decay G, off by a rounding of |G| per token, and with them the share of a value that is left.
    """
    tokens, d = len(inputs.value), sum(state.shape[1:])
    reach = state.abs().max().item() * d + tokens * inputs.value.abs().max().item()
    size = max(state.abs().max().item(), inputs.value.abs().max().item())
    return 4 * EPS * (d + tokens) * reach + EPS * tokens * inputs.log_decay.sum(dim=0).abs().max().item() * size


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", DELTA_SHAPES, ids=str)
@pytest.mark.parametrize("size", [0.0, 2.0])
def test_delta_step(shape, decay, size):
    for seed in range(20):
        inputs, state = delta_inputs(1, shape, decay, seed), normal(shape[1], *shape[2:], seed=seed, size=size)
        expected, after = recurrence(inputs, state)
        found, found_after = OPS.delta_step(inputs, state)
        near(found, expected, delta_noise(inputs, state))
        near(found_after, after, delta_noise(inputs, state))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", DELTA_SHAPES[:2], ids=str)
def test_delta_chunk_is_the_recurrence_at_every_length(shape, decay):
    for tokens in range(1, 71):
        inputs, state = delta_inputs(tokens, shape, decay, tokens), normal(shape[1], *shape[2:], seed=tokens)
        expected, after = recurrence(inputs, state)
        found, found_after = OPS.delta_chunk(inputs, state)
        near(found, expected, delta_noise(inputs, state))
        near(found_after, after, delta_noise(inputs, state))


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("log_decay", [0.0, -104.0, -746.0])
def test_delta_chunk_at_the_edges_of_its_gates(beta, log_decay):
    """beta 0 writes nothing; decay 1 forgets nothing; a decay of 0 leaves only what this token writes."""
    shape = DELTA_SHAPES[0]
    inputs, state = delta_inputs(64, shape, "normal"), normal(shape[1], *shape[2:])
    inputs.beta.fill_(beta)
    inputs.log_decay.fill_(log_decay)
    expected, after = recurrence(inputs, state)
    found, found_after = OPS.delta_chunk(inputs, state)
    near(found, expected, delta_noise(inputs, state))
    near(found_after, after, delta_noise(inputs, state))
    if beta == 0:
        # exp(-104) is no zero in float64
        wanted = state.double() * np.exp(log_decay * 64)
        assert torch.equal(found_after, wanted)


def test_equal_keys_with_beta_one_overwrite():
    """The hardest system for the triangular solve: every token writes to the same place, the last one stays."""
    shape = (1, 1, 8, 4)
    inputs, state = delta_inputs(64, shape, "normal"), torch.zeros(1, 8, 4)
    inputs.beta.fill_(1.0)
    inputs.log_decay.fill_(0.0)
    inputs.key[:] = inputs.key[0]
    expected, after = recurrence(inputs, state)
    found, found_after = OPS.delta_chunk(inputs, state)
    near(found, expected, delta_noise(inputs, state))
    near(found_after, after, delta_noise(inputs, state))


def test_zero_keys_are_no_nan():
    inputs, state = delta_inputs(5, DELTA_SHAPES[0], "normal"), normal(4, 8, 6)
    inputs.key.zero_()
    inputs.query.zero_()
    for found in (*OPS.delta_chunk(inputs, state), *OPS.delta_step(inputs[:1], state)):
        assert found.isfinite().all()


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
    near(OPS.experts(x, routing, experts.__getitem__), expected, bound)


def test_experts_give_a_row_the_same_float32_bits_in_any_company():
    """As for linear: the order of BLAS shows in float64 at most."""
    experts, x = [expert_of(number) for number in range(6)], normal(20, 130, size=0.1)
    routing = random_routing(20, 6, 3)
    together = OPS.experts(x, routing, experts.__getitem__)
    order = torch.from_numpy(np.random.default_rng(1).permutation(20))
    shuffled = OPS.experts(x[order], Routing(routing.experts[order], routing.weights[order]), experts.__getitem__)
    assert torch.equal(shuffled.float(), together[order].float())
    for t in range(20):
        own = Routing(routing.experts[t : t + 1], routing.weights[t : t + 1])
        alone = OPS.experts(x[t : t + 1], own, experts.__getitem__)[0]
        assert torch.equal(alone.float(), together[t].float())


def test_only_experts_in_use_are_asked_for_and_each_once():
    asked: list[int] = []

    def expert(number: int) -> Expert:
        asked.append(number)
        return expert_of(number)

    routing = Routing(torch.tensor([[4, 1], [1, 4], [1, 2]]), torch.full((3, 2), 0.5))
    OPS.experts(normal(3, 130), routing, expert)
    assert sorted(asked) == [1, 2, 4]


# --- all of them ------------------------------------------------------------------------------------------------------


def test_no_operation_changes_its_arguments():
    inputs, state = delta_inputs(6, DELTA_SHAPES[0], "normal"), normal(4, 8, 6)
    matrices, x, head = expert_of(0), normal(4, 130), normal(4, 2, 8)
    calls = [
        (OPS.embed, normal(9, 4), torch.tensor([1, 2])),
        (OPS.linear, x, matrices.gate),
        (OPS.rms_norm, x, normal(130), 1e-6, 1.0),
        (OPS.add_rms_norm, x, normal(4, 130, seed=1), normal(130), 1e-6, 1.0),
        (OPS.gated_rms_norm, x, normal(130), normal(4, 130, seed=1), 1e-6),
        (OPS.rotate, head, torch.arange(4), 4, 1e4),
        (OPS.attend, head, normal(7, 1, 8), normal(7, 1, 8, seed=1)),
        (OPS.sigmoid_gate, x, normal(4, 1)),
        (OPS.causal_conv, x, normal(3, 130, seed=1), normal(130, 1, 4)),
        (OPS.delta_gates, head[:, 0], head[:, 1], normal(8), normal(8, seed=1)),
        (OPS.delta_step, inputs[:1], state),
        (OPS.delta_chunk, inputs, state),
        (OPS.linears, x, [matrices.gate, matrices.up]),
        (OPS.route, x, 2, True, normal(4, 1)),
        (OPS.swiglu, x, matrices.gate, matrices.up, matrices.down),
        (OPS.experts, x, random_routing(4, 6, 2), expert_of),
    ]
    public = {name for name in vars(ReferenceOps) if not name.startswith("_")} - {"attention"}  # `attend` of a cache
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


def test_delta_inputs_are_sliced_by_tokens():
    inputs = delta_inputs(6, DELTA_SHAPES[0], "normal")
    part = inputs[2:5]
    for name in ("query", "key", "value", "log_decay", "beta"):
        assert torch.equal(getattr(part, name), getattr(inputs, name)[2:5])
