"""Gated DeltaNet for one token: a launch for the convolution, one for the rule and the gated norm.

A head's state passes through registers once. States are changed in place. Maths: docs/MODELS.md, section 3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.decode import silu
from mosaic.runtime.ops.cuda.norms import inverse_rms
from mosaic.runtime.ops.reference_delta import L2_EPS
from mosaic.runtime.state import DeltaState

CHANNELS = 256  # of a program
UNIT_EPS = tl.constexpr(L2_EPS)
TERMS = tl.constexpr(8)  # of the series in `softplus`: with 3^-2 between them, the rest is below 2^-28 of the sum


@triton.jit
def _conv(
    x: tl.tensor,
    history: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    channels: int,
    taps: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = channel < channels
    total = tl.zeros((tile,), tl.float32)
    for tap in tl.static_range(taps):
        if tap < taps - 1:
            value = tl.load(history + tap * channels + channel, mask=inside, other=0.0)
        else:
            value = tl.load(x + channel, mask=inside, other=0.0)
        if tap > 0:
            tl.store(history + (tap - 1) * channels + channel, value, mask=inside)
        total += value * tl.load(weight + channel * taps + tap, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + channel, silu(total), mask=inside)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), exact to some roundings of the result however small it is; log(1 + u) = 2 atanh(u / (2 + u))."""
    small = tl.exp(-tl.abs(x))
    ratio = small / (2 + small)  # at most 1/3
    square, series = ratio * ratio, 0.0
    for term in tl.static_range(TERMS):
        series = series * square + 1 / (2 * (TERMS - term) - 1)
    return tl.maximum(x, 0) + 2 * ratio * series


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) + UNIT_EPS))


@triton.jit
def _step(
    mixed: tl.tensor,
    z: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    norm: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    key_heads: int,
    ratio: int,
    eps: float,
    scale: float,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    source, place, column = head // ratio * key_dim, tl.arange(0, key_dim), tl.arange(0, value_dim)
    query = _unit(tl.load(mixed + source + place)) * scale
    key = _unit(tl.load(mixed + key_heads * key_dim + source + place))
    value = tl.load(mixed + 2 * key_heads * key_dim + head * value_dim + column)
    rate = softplus(tl.load(a + head) + tl.load(dt_bias + head).to(tl.float32))
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * rate)
    cells = state + head * key_dim * value_dim + place[:, None] * value_dim + column[None, :]
    held = tl.load(cells) * decay
    written = tl.sigmoid(tl.load(b + head)) * (value - tl.sum(held * key[:, None], axis=0))
    held += key[:, None] * written[None, :]
    tl.store(cells, held)
    read = tl.sum(held * query[:, None], axis=0)
    gate = silu(tl.load(z + head * value_dim + column))
    factor = tl.load(norm + column).to(tl.float32) * gate
    tl.store(out + head * value_dim + column, read * inverse_rms(read, value_dim, eps) * factor)


def gated_delta_step(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
    """See `mosaic.runtime.ops.Ops.gated_delta`, of one token: [1, value heads * d_v]; d_k and d_v are powers of two.

    Advances `state.conv` and `state.recurrent` in place, but not `state.position`, which is the host's.
    """
    heads, key_dim, value_dim = state.recurrent.shape
    channels, taps = weights.conv.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    assert inputs.qkv.shape == (1, channels), (inputs.qkv.shape, channels)
    assert inputs.z.shape == (1, heads * value_dim), inputs.z.shape
    assert inputs.b.shape == inputs.a.shape == (1, heads), (inputs.b.shape, inputs.a.shape)
    assert state.conv.shape == (taps - 1, channels), (state.conv.shape, weights.conv.shape)
    assert heads % key_heads == 0, (heads, key_heads)
    assert all(part.is_contiguous() for part in (state.conv, state.recurrent, weights.conv))
    device = inputs.qkv.device
    mixed, out = torch.empty(channels, device=device), torch.empty(1, heads * value_dim, device=device)
    _conv[triton.cdiv(channels, CHANNELS),](
        inputs.qkv.contiguous(), state.conv, weights.conv, mixed, channels, taps=taps, tile=CHANNELS, num_warps=4
    )
    _step[heads,](
        mixed,
        inputs.z.contiguous(),
        inputs.b.contiguous(),
        inputs.a.contiguous(),
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        state.recurrent,
        out,
        key_heads,
        heads // key_heads,
        weights.eps,
        key_dim**-0.5,
        key_dim=key_dim,
        value_dim=value_dim,
        num_warps=8,
    )
    return out
