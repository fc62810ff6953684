"""Gated DeltaNet of ReferenceOps against float64 numpy. Tolerance: see tests/support/exact.py."""

import itertools

import numpy as np
import pytest
import torch

from mosaic.format.spec import GatedDeltaSpec
from mosaic.runtime.ops import DeltaInputs, DeltaWeights, reference_delta
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.ops.reference_delta import RuleInputs
from mosaic.runtime.state import DeltaState
from support.exact import EPS, f64, near, normal, sigmoid, silu

OPS = ReferenceOps()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_gated_rms_norm(eps):
    """The weight is the gain itself, without offset; the gate goes through silu, down to where sigmoid underflows."""
    x, weight, gate = normal(6, 3, 32, size=0.1), normal(32, seed=1), normal(6, 3, 32, seed=2, size=8.0)
    gate[0, 0, :4] = torch.tensor([0.0, -90.0, 90.0, -1e4])
    expected = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + eps) * f64(weight) * silu(f64(gate))
    near(reference_delta.gated_rms_norm(x, weight, gate, eps), expected)


def conv_by_hand(x: np.ndarray, history: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and, for the noise, the sum of the sizes."""
    taps = weight.shape[-1]
    padded = np.concatenate((history, x))
    total, sizes = np.zeros_like(x), np.zeros_like(x)
    for t, j in itertools.product(range(len(x)), range(taps)):
        term = weight[:, j] * padded[t + j]
        total[t] += term
        sizes[t] += np.abs(term)
    return silu(total), sizes


@pytest.mark.parametrize("taps", [2, 4, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("old", [False, True], ids=["first", "later"])
def test_causal_conv(taps, tokens, old):
    """|silu'| < 1.1 carries the noise of the sum on."""
    x, weight = normal(tokens, 10), normal(10, taps, seed=1).bfloat16()
    history = normal(taps - 1, 10, seed=2) if old else torch.zeros(taps - 1, 10)
    found, after = reference_delta.causal_conv(x, history, weight)
    expected, sizes = conv_by_hand(f64(x), f64(history), f64(weight))
    near(found, expected, 4 * taps * EPS * sizes)
    assert np.array_equal(f64(after), f64(torch.cat((history, x))[tokens:]))


def test_causal_conv_in_pieces_has_the_same_bits():
    """Elementwise sums in the order of the taps: no BLAS, no other order."""
    x, weight, history = normal(12, 10), normal(10, 4, seed=1), normal(3, 10, seed=2)
    whole, end = reference_delta.causal_conv(x, history, weight)
    parts = []
    for first, last in ((0, 1), (1, 3), (3, 4), (4, 9), (9, 12)):
        part, history = reference_delta.causal_conv(x[first:last], history, weight)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(history, end)


def test_delta_gates():
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b): from no decay to an underflow of exp(g)."""
    heads = 8
    a, b = normal(50, heads, size=12.0), normal(50, heads, seed=1, size=12.0)
    a[0], b[0] = torch.linspace(-100, 100, heads), torch.linspace(-120, 120, heads)
    a_log, dt_bias = torch.linspace(-5, 5, heads).bfloat16(), torch.linspace(-2, 3, heads).bfloat16()
    log_decay, beta = reference_delta.delta_gates(a, b, a_log, dt_bias)
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


def delta_inputs(tokens: int, shape: tuple[int, int, int, int], decay: str, seed: int = 0) -> RuleInputs:
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
    return RuleInputs(*(torch.from_numpy(part).float() for part in parts))


def recurrence(inputs: RuleInputs, state: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
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


def delta_noise(inputs: RuleInputs, state: torch.Tensor) -> float:
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
        found, found_after = reference_delta.delta_step(inputs, state)
        near(found, expected, delta_noise(inputs, state))
        near(found_after, after, delta_noise(inputs, state))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", DELTA_SHAPES[:2], ids=str)
def test_delta_chunk_is_the_recurrence_at_every_length(shape, decay):
    for tokens in range(1, 71):
        inputs, state = delta_inputs(tokens, shape, decay, tokens), normal(shape[1], *shape[2:], seed=tokens)
        expected, after = recurrence(inputs, state)
        found, found_after = reference_delta.delta_chunk(inputs, state)
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
    found, found_after = reference_delta.delta_chunk(inputs, state)
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
    found, found_after = reference_delta.delta_chunk(inputs, state)
    near(found, expected, delta_noise(inputs, state))
    near(found_after, after, delta_noise(inputs, state))


def test_zero_keys_are_no_nan():
    inputs, state = delta_inputs(5, DELTA_SHAPES[0], "normal"), normal(4, 8, 6)
    inputs.key.zero_()
    inputs.query.zero_()
    for found in (*reference_delta.delta_chunk(inputs, state), *reference_delta.delta_step(inputs[:1], state)):
        assert found.isfinite().all()


def test_delta_inputs_are_sliced_by_tokens():
    inputs = delta_inputs(6, DELTA_SHAPES[0], "normal")
    part = inputs[2:5]
    for name in ("query", "key", "value", "log_decay", "beta"):
        assert torch.equal(getattr(part, name), getattr(inputs, name)[2:5])


def test_the_whole_mixer_is_its_parts():
    """Cut anywhere: queries, keys and values side by side, one more normalised, gated and flattened."""
    tokens, key_heads, heads, key_dim, value_dim = 70, 2, 4, 8, 6
    channels = 2 * key_heads * key_dim + heads * value_dim
    made = (normal(tokens, width, seed=seed) for seed, width in enumerate((channels, heads * value_dim, heads, heads)))
    inputs = DeltaInputs(*made)
    weights = DeltaWeights(
        *(normal(*shape, seed=9) for shape in ((channels, 4), (heads,), (heads,), (value_dim,))), 1e-6
    )
    spec = GatedDeltaSpec(key_heads, heads, key_dim, value_dim, conv_kernel=4, grouped=False)
    state = DeltaState(spec)
    pieces = (0, 1, 2, 31, 70)
    found = []
    for first, last in itertools.pairwise(pieces):
        state.reserve(last - first)
        piece = DeltaInputs(*(part[first:last] for part in vars(inputs).values()))
        found.append(OPS.gated_delta(piece, weights, state))
    mixed, sizes = conv_by_hand(f64(inputs.qkv), np.zeros((3, channels)), f64(weights.conv))
    query, key, value = np.split(mixed, (key_heads * key_dim, 2 * key_heads * key_dim), axis=1)
    query, key = (part.reshape(tokens, key_heads, key_dim) for part in (query, key))
    value = value.reshape(tokens, heads, value_dim)
    log_decay = -np.exp(f64(weights.a_log)) * np.logaddexp(0, f64(inputs.a) + f64(weights.dt_bias))
    rule = RuleInputs(*map(torch.from_numpy, (query, key, value, log_decay, sigmoid(f64(inputs.b)))))
    read, after = recurrence(rule, torch.zeros(heads, key_dim, value_dim))
    gate = silu(f64(inputs.z)).reshape(read.shape)
    expected = read / np.sqrt((read**2).mean(-1, keepdims=True) + 1e-6) * f64(weights.norm) * gate
    noise = delta_noise(rule, torch.from_numpy(after)) + 16 * EPS * sizes.max()
    near(state.recurrent, after, noise)
    near(torch.cat(found), expected.reshape(tokens, -1), 1e3 * noise)  # the norm divides by 1e-3 at least, sqrt(eps)
    assert state.position == tokens
    assert torch.equal(state.conv, inputs.qkv[-3:])
