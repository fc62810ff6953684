"""What remembers: attention over pages, and Gated DeltaNet."""

import numpy as np
import pytest
import torch

from mosaic.format.spec import GatedDeltaSpec
from mosaic.runtime.kv import KVCache, KVFormat, KVPool
from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.attention import STEP, Pages, attend
from mosaic.runtime.ops.cuda.delta import gated_delta_step
from mosaic.runtime.ops.reference import ReferenceOps
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


def unit(x):
    return x * ((x * x).sum(-1) + 1e-6).inverse_root()[..., None]


def stepped(inputs, weights, state, spec):
    """Output, new state and new history of one token by the formulas of docs/MODELS.md."""
    exact = {name: Rounded(part.double().numpy()[0]) for name, part in vars(inputs).items()}
    taps = Rounded(weights.conv.double().numpy().T)
    window = np.concatenate((state.conv.double().numpy(), exact["qkv"].value[None]))
    mixed = (Rounded(window) * taps).sum(0).silu()
    width, key_dim = spec.num_key_heads * spec.key_head_dim, spec.key_head_dim
    ratio = spec.num_value_heads // spec.num_key_heads
    source = np.arange(spec.num_value_heads) // ratio
    shaped = [
        Rounded(part.value.reshape(-1, key_dim), part.error.reshape(-1, key_dim))[source]
        for part in (mixed[:width], mixed[width : 2 * width])
    ]
    query = unit(shaped[0]) * Rounded(key_dim**-0.5, UNIT * key_dim**-0.5)
    key = unit(shaped[1])
    rest, shape = mixed[2 * width :], (spec.num_value_heads, spec.value_head_dim)
    value = Rounded(rest.value.reshape(shape), rest.error.reshape(shape))
    rate = softplus(exact["a"] + Rounded(weights.dt_bias.double().numpy()))
    decay = (-(Rounded(weights.a_log.double().numpy()).exp() * rate)).exp()
    held = Rounded(state.recurrent.double().numpy()) * decay[:, None, None]
    written = exact["b"].sigmoid()[:, None] * (value - (held * key[:, :, None]).sum(1))
    held = held + key[:, :, None] * written[:, None, :]
    read = (held * query[:, :, None]).sum(1)
    mean = (read * read).sum(-1) * Rounded(1 / shape[1], 4 * UNIT / shape[1]) + weights.eps
    z = Rounded(exact["z"].value.reshape(shape)).silu()
    result = read * mean.inverse_root()[:, None] * (Rounded(weights.norm.double().numpy()) * z)
    return Rounded(result.value.reshape(1, -1), result.error.reshape(1, -1)), held, window[1:]


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2.0), (torch.float32, 1e-3)])
@pytest.mark.parametrize("spec", [sizes(2, 4, 16, 32, 4), sizes(3, 3, 32, 16, 2), sizes(1, 4, 16, 16, 5)], ids=str)
def test_gated_delta_step(spec, dtype, size, device):
    """Step after step, each from the state that the kernel has left; its error is that of one step.

    Queries and keys of size 1e-3 are no longer than what keeps their scaling from dividing by 0.
    """
    heads, width = spec.num_value_heads, spec.num_value_heads * spec.value_head_dim
    small = [normal(size, seed=seed).to(dtype) for seed, size in enumerate((heads, heads, spec.value_head_dim))]
    weights = DeltaWeights(normal(spec.conv_dim, spec.conv_kernel, seed=9).to(dtype), *small, 1e-6)
    moved = DeltaWeights(*(getattr(weights, name).to(device) for name in ("conv", "a_log", "dt_bias", "norm")), 1e-6)
    state, ours = DeltaState(spec), DeltaState(spec)
    ours.conv, ours.recurrent = ours.conv.to(device), ours.recurrent.to(device)
    for step in range(5):
        parts = spec.conv_dim, width, heads, heads
        inputs = DeltaInputs(*(normal(1, size, seed=10 * step + k, size=2.0) for k, size in enumerate(parts)))
        inputs.qkv.mul_(size)
        if step == 3:
            inputs.a[:] = torch.linspace(-80, 80, heads)  # decays of 1 and of 0
        result, held, history = stepped(inputs, weights, state, spec)
        found = gated_delta_step(DeltaInputs(*(part.to(device) for part in vars(inputs).values())), moved, ours)
        result.agrees(OPS.gated_delta(inputs, weights, state))
        held.agrees(state.recurrent)
        result.holds(found)
        held.holds(ours.recurrent)
        assert np.array_equal(history, ours.conv.cpu().double().numpy())
        assert ours.position == 0
        state.conv, state.recurrent = ours.conv.cpu().clone(), ours.recurrent.cpu().clone()
