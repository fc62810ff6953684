"""Gated DeltaNet: of one token, and of many in chunks."""

import numpy as np
import pytest
import torch

from mosaic.format.spec import GatedDeltaSpec
from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.delta import gated_delta_step
from mosaic.runtime.ops.cuda.delta_chunk import gated_delta_chunk
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.ops.reference_delta import CHUNK
from mosaic.runtime.state import DeltaState
from support.gpu_weights import normal
from support.rounding import UNIT, Rounded

OPS = ReferenceOps()


def sizes(key_heads, value_heads, key_dim, value_dim, taps):
    return GatedDeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel=taps,
        grouped=False,
    )


def softplus(x):
    """As in the kernel: max(x, 0) + 2 atanh(u / (2 + u)); the rest of the series is below 2^-28 of its sum."""
    small = (-Rounded(np.abs(x.value), x.error)).exp()
    ratio = small * (small + 2.0).reciprocal()
    series = Rounded(np.arctanh(ratio.value) / ratio.value, 12 * UNIT)  # eight steps, each 1/9 of the one before
    return Rounded(np.maximum(x.value, 0), x.error) + ratio * series * 2.0


SPECS = [sizes(2, 4, 16, 32, 4), sizes(3, 3, 32, 16, 2), sizes(1, 4, 16, 16, 5)]


def some_weights(spec, dtype):
    heads = spec.num_value_heads
    small = [normal(size, seed=seed).to(dtype) for seed, size in enumerate((heads, heads, spec.value_head_dim))]
    return DeltaWeights(normal(spec.conv_dim, spec.conv_kernel, seed=9).to(dtype), *small, 1e-6)


def some_inputs(spec, tokens, seed, size=1.0):
    heads, width = spec.num_value_heads, spec.num_value_heads * spec.value_head_dim
    parts = spec.conv_dim, width, heads, heads
    inputs = DeltaInputs(*(normal(tokens, part, seed=seed + place, size=2.0) for place, part in enumerate(parts)))
    inputs.qkv.mul_(size)
    return inputs


def some_state(spec, device="cpu"):
    state = DeltaState(spec)
    state.conv, state.recurrent = normal(*state.conv.shape, seed=50), normal(*state.recurrent.shape, seed=51)
    state.conv, state.recurrent = state.conv.to(device), state.recurrent.to(device)
    return state


def tokens_of(inputs, first, last, device):
    return DeltaInputs(*(part[first:last].to(device) for part in vars(inputs).values()))


def weights_on(device, weights):
    return DeltaWeights(*(getattr(weights, name).to(device) for name in ("conv", "a_log", "dt_bias", "norm")), 1e-6)


class Formulas:
    """What docs/MODELS.md says of some tokens, up to the rule: all `Rounded`, heads before tokens.

    query and key [value heads, T, d_k], not scaled; asked and known [value heads, T] what scales them; value [value
    heads, T, d_v]; log_decay and beta [value heads, T].
    """

    def __init__(self, inputs, weights, state, spec):
        tokens, taps = len(inputs.qkv), Rounded(weights.conv.double().numpy().T)
        window = np.concatenate((state.conv.double().numpy(), inputs.qkv.double().numpy()))
        self.history = window[tokens:]
        windows = np.stack([window[place : place + tokens] for place in range(spec.conv_kernel)])
        mixed = (Rounded(windows) * taps[:, None]).sum(0).silu()
        width, heads = spec.num_key_heads * spec.key_head_dim, spec.num_value_heads
        source = np.arange(heads) // (heads // spec.num_key_heads)

        def by_head(x, dim):
            return x.shaped(tokens, -1, dim).swapped()

        self.query = by_head(mixed[:, :width], spec.key_head_dim)[source]
        self.key = by_head(mixed[:, width : 2 * width], spec.key_head_dim)[source]
        self.value = by_head(mixed[:, 2 * width :], spec.value_head_dim)
        scale = spec.key_head_dim**-0.5
        self.asked, self.known = (((x * x).sum(-1) + 1e-6).inverse_root() for x in (self.query, self.key))
        self.asked = self.asked * Rounded(scale, UNIT * scale)
        a, b = (Rounded(part.double().numpy().T) for part in (inputs.a, inputs.b))
        rate = softplus(a + Rounded(weights.dt_bias.double().numpy()[:, None]))
        self.log_decay = -(Rounded(weights.a_log.double().numpy()[:, None]).exp() * rate)
        self.beta = b.sigmoid()


def normed(read, inputs, weights):
    """Of reads [value heads, T, d_v]."""
    (heads, tokens, dim), z = read.value.shape, Rounded(inputs.z.double().numpy()).silu()
    read = read.swapped()
    mean = (read * read).sum(-1) * Rounded(1 / dim, 4 * UNIT / dim) + weights.eps
    gain = Rounded(weights.norm.double().numpy()) * z.shaped(tokens, heads, dim)
    return (read * mean.inverse_root()[..., None] * gain).shaped(tokens, -1)


def stepped(inputs, weights, state, spec):
    """Output, new state and new history of one token."""
    found = Formulas(inputs, weights, state, spec)
    query, key = found.query[:, 0] * found.asked, found.key[:, 0] * found.known
    held = Rounded(state.recurrent.double().numpy()) * found.log_decay.exp()[:, :, None]
    written = found.beta * (found.value[:, 0] - (held * key[:, :, None]).sum(1))
    held = held + key[:, :, None] * written[:, None, :]
    read = (held * query[:, :, None]).sum(1)
    return normed(read[:, None], inputs, weights), held, found.history


def inverted(system):
    """The inverse of I + a strictly lower matrix, found row after row.

    Its columns solve their systems up to what n roundings of the terms amount to, for a matrix that itself is off:
    (I + A) X = I + E with |E| <= M |X|, so that X is off by |inverse| |E| (Higham, Accuracy and Stability, 8.1).
    """
    count = len(system.value)
    inverse = np.linalg.inv(np.eye(count) + system.value)
    residual = (count + 2) * UNIT * (np.eye(count) + np.abs(system.value) + system.error) + system.error
    grown = np.abs(inverse) @ residual
    return Rounded(inverse, np.linalg.solve(np.eye(count) - grown, grown @ np.abs(inverse)))


def chunked(inputs, weights, state, spec):
    """Output, new state and new history of one chunk."""
    found = Formulas(inputs, weights, state, spec)
    heads = [ruled(found, head, Rounded(held.double().numpy())) for head, held in enumerate(state.recurrent)]
    read, held = (Rounded.stack(parts) for parts in zip(*heads, strict=True))
    return normed(read, inputs, weights), held, found.history


def ruled(found, head, held):
    """Reads [T, d_v] and the new state of a head: delta_chunk.py has the formulas."""
    query, key, beta = found.query[head], found.key[head], found.beta[head]
    asked, known = found.asked[head], found.known[head]
    logs = found.log_decay[head]
    total, off = logs.value.cumsum(), logs.error.cumsum()  # summed in float64
    past = np.tri(len(total), dtype=bool)

    def decay(value, error):
        return Rounded(value, error + UNIT * np.abs(value)).exp()

    since, until = decay(total, off), decay(total[-1] - total, off[-1] - off)
    between = np.where(past, total[:, None] - total, -np.inf), np.where(past, off[:, None] - off, 0)
    with np.errstate(invalid="ignore"):
        between = decay(*between)
    between = Rounded(np.where(past, between.value, 0), np.where(past, between.error, 0))
    shares = query @ key.swapped() * between * asked[:, None] * known
    system = key @ key.swapped() * between * (beta * known)[:, None] * known
    strict = np.tri(len(total), k=-1)
    inverses = inverted(Rounded(system.value * strict, system.error * strict)) * beta
    errors = found.value[head] - key @ held * (known * since)[:, None]
    written = inverses @ errors
    read = query @ held * (asked * since)[:, None] + shares @ written
    return read, held * since[-1] + key.swapped() @ (written * (known * until)[:, None])


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2.0), (torch.float32, 1e-3)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step(spec, dtype, size, device):
    """Step after step, each from the state that the kernel has left; its error is that of one step.

    Queries and keys of size 1e-3 are no longer than what keeps their scaling from dividing by 0.
    """
    weights, state, ours = some_weights(spec, dtype), DeltaState(spec), DeltaState(spec)
    ours.conv, ours.recurrent = ours.conv.to(device), ours.recurrent.to(device)
    for step in range(5):
        inputs = some_inputs(spec, 1, 10 * step, size)
        if step == 3:
            inputs.a[:] = torch.linspace(-80, 80, spec.num_value_heads)  # decays of 1 and of 0
        result, held, history = stepped(inputs, weights, state, spec)
        found = gated_delta_step(tokens_of(inputs, 0, 1, device), weights_on(device, weights), ours)
        result.agrees(OPS.gated_delta(inputs, weights, state))
        held.agrees(state.recurrent)
        result.holds(found)
        held.holds(ours.recurrent)
        assert np.array_equal(history, ours.conv.cpu().double().numpy())
        assert ours.position == 0  # the host's
        state.conv, state.recurrent = ours.conv.cpu().clone(), ours.recurrent.cpu().clone()


@pytest.mark.parametrize("tokens", [1, 2, 17, CHUNK])
@pytest.mark.parametrize(
    ("spec", "dtype", "size"),
    [(SPECS[0], torch.bfloat16, 2.0), (SPECS[1], torch.float32, 1e-3), (SPECS[2], torch.bfloat16, 2.0)],
    ids=str,
)
def test_a_chunk(spec, tokens, dtype, size, device):
    """From a state that is not 0. Some tokens leave nothing of it, others all."""
    weights, state, ours = some_weights(spec, dtype), some_state(spec), some_state(spec, device)
    inputs = some_inputs(spec, tokens, 20, size)
    inputs.a[tokens // 2] = torch.linspace(-80, 80, spec.num_value_heads)
    result, held, history = chunked(inputs, weights, state, spec)
    found = gated_delta_chunk(tokens_of(inputs, 0, tokens, device), weights_on(device, weights), ours)
    result.agrees(OPS.gated_delta(inputs, weights, state))
    held.agrees(state.recurrent)
    result.holds(found)
    held.holds(ours.recurrent)
    assert np.array_equal(history, ours.conv.cpu().double().numpy())
    assert ours.position == 0


def test_chunks_follow_each_other(device):
    """All in one call: the bits of one call for each chunk, of which `test_a_chunk` knows how good they are."""
    spec, tokens = sizes(1, 2, 16, 16, 4), 2 * CHUNK + 9
    weights, inputs = weights_on(device, some_weights(spec, torch.bfloat16)), some_inputs(spec, tokens, 30)
    whole, state = some_state(spec, device), some_state(spec, device)
    found = gated_delta_chunk(tokens_of(inputs, 0, tokens, device), weights, whole)
    parts = [
        gated_delta_chunk(tokens_of(inputs, first, min(first + CHUNK, tokens), device), weights, state)
        for first in range(0, tokens, CHUNK)
    ]
    assert torch.equal(found, torch.cat(parts))
    assert torch.equal(whole.recurrent, state.recurrent)
    assert torch.equal(whole.conv, state.conv)
