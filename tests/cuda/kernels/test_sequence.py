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
from support.states import append

OPS = ReferenceOps()


def filled(kv, length, kv_heads, dim):
    """Its last key is a long one: for some heads that has by far the highest score, and not in the first segment."""
    cache, keys = KVCache(KVPool(kv_heads, dim, kv)), normal(length, kv_heads, dim, seed=1)
    keys[-1] *= 100
    append(cache, keys, normal(length, kv_heads, dim, seed=2))
    return cache


def pages_of(cache, device, spare=3):
    """The cache's pages in another order in a pool with NaN around them, and behind the last token."""
    count, shape = len(cache.pages), cache.pages[0].values.shape
    places = torch.randperm(count + spare, generator=torch.Generator().manual_seed(0))[:count]
    codes = cache.format is KVFormat.E4M3
    values = torch.full((count + spare, *shape), 0x7F if codes else torch.nan, dtype=torch.uint8 if codes else None)
    values = values if codes else values.to(cache.pages[0].values.dtype)
    scales = torch.full((count + spare, *shape[:-1], 1), torch.nan)
    for number, (place, page) in enumerate(zip(places.tolist(), cache.pages, strict=True)):
        seen = min(64, cache.length - 64 * number)
        values[place, :, :seen] = page.values.view(values.dtype)[:, :seen]
        if codes:
            scales[place, :, :seen] = page.scales[:, :seen]
    table = torch.cat((places, torch.full((9,), 10**6))).int()  # room for more tokens
    held = [part.to(device) for part in (values, table, torch.tensor([cache.length], dtype=torch.int32))]
    return Pages(held[0], scales.to(device) if codes else None, *held[1:])


def attended(query, cache):
    """Shares of the softmax, and values, with what the merging of steps and segments adds to the roundings."""
    heads, dim = query.shape
    keys, values = (part.double().numpy() for part in cache.read())
    results = []
    for head in range(heads):
        kv_head = head // (heads // cache.kv_heads)
        asked = Rounded(query[head].double().numpy()) * Rounded(dim**-0.5, UNIT * dim**-0.5)
        scores = asked.dot(keys[:, kv_head])
        shares = (scores - scores.value.max()).exp()
        # The highest score so far is another one than that of all; what was added up is scaled down to the new one
        # at most once a step, and once more when segments are merged.
        reach = scores.value.max() - scores.value.min() + 2 * scores.error.max()
        scaled = (len(keys) // STEP.value + 2) * 9 + 4 * reach
        shares = Rounded(shares.value, shares.error + shares.value * scaled * UNIT)
        total = (shares[:, None] * Rounded(values[:, kv_head])).sum(0)
        result = total * shares.sum(0).reciprocal()
        results.append((result.value, result.error))
    return Rounded(*(np.stack(parts) for parts in zip(*results, strict=True)))


@pytest.mark.parametrize("kv", KVFormat)
@pytest.mark.parametrize("length", [1, 15, 64, 65, 600])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 4, 16)])
def test_attention(heads, kv_heads, dim, length, kv, device):
    cache, query = filled(kv, length, kv_heads, dim), normal(heads, dim, size=3.0)
    expected = attended(query, cache)
    expected.agrees(OPS.attend(query[None], *cache.read())[0])
    expected.holds(attend(query.to(device), pages_of(cache, device), None))


def test_the_gate(device):
    """Its rows may have gaps, as those of a projection to queries and gates."""
    cache, both = filled(KVFormat.BF16, 70, 2, 32), normal(6, 64, size=2.0)
    query, gate = both.chunk(2, dim=1)
    expected = attended(query, cache) * Rounded(gate.double().numpy()).sigmoid()
    expected.agrees(OPS.sigmoid_gate(OPS.attend(query[None], *cache.read())[0], gate))
    moved = both.to(device)
    expected.holds(attend(moved[:, :32], pages_of(cache, device), moved[:, 32:]))


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
