"""Gated DeltaNet for one token: a launch for the convolution, one for the rule and the gated norm.

A head's state passes through registers once. States are changed in place. Maths: docs/MODELS.md, section 3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.decode import silu
from mosaic.runtime.ops.cuda.delta_conv import conv_step
from mosaic.runtime.ops.cuda.norms import inverse_rms
from mosaic.runtime.ops.reference_delta import L2_EPS
from mosaic.runtime.state import DeltaState

UNIT_EPS = tl.constexpr(L2_EPS)
TERMS = tl.constexpr(8)  # of the series in `softplus`: with 3^-2 between them, the rest is below 2^-28 of the sum


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
def log_decay(a: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor) -> tl.tensor:
    """Of a head, whose `a_log` and `dt_bias` are pointed to; not positive."""
    return -tl.exp(tl.load(a_log).to(tl.float32)) * softplus(a + tl.load(dt_bias).to(tl.float32))


@triton.jit
def inverse_length(squares: tl.tensor) -> tl.tensor:
    """What a query or key, whose squares have this sum, is multiplied with."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares + UNIT_EPS))


@triton.jit
def gated_norm(x: tl.tensor, z: tl.tensor, norm: tl.tensor, count: int, eps: float) -> tl.tensor:
    """X / rms(x) * norm * silu(z), with pointers to z and norm."""
    factor = tl.load(norm).to(tl.float32) * silu(tl.load(z))
    return x * inverse_rms(x, count, eps) * factor


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
    query = tl.load(mixed + source + place)
    query *= inverse_length(tl.sum(query * query, axis=0)) * scale
    key = tl.load(mixed + key_heads * key_dim + source + place)
    key *= inverse_length(tl.sum(key * key, axis=0))
    value = tl.load(mixed + 2 * key_heads * key_dim + head * value_dim + column)
    decay = tl.exp(log_decay(tl.load(a + head), a_log + head, dt_bias + head))
    cells = state + head * key_dim * value_dim + place[:, None] * value_dim + column[None, :]
    held = tl.load(cells) * decay
    written = tl.sigmoid(tl.load(b + head)) * (value - tl.sum(held * key[:, None], axis=0))
    held += key[:, None] * written[None, :]
    tl.store(cells, held)
    read = tl.sum(held * query[:, None], axis=0)
    place = head * value_dim + column
    tl.store(out + place, gated_norm(read, z + place, norm + column, value_dim, eps))


def gated_delta_step(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
    """See `mosaic.runtime.ops.Ops.gated_delta`, of one token: [1, value heads * d_v]; d_k and d_v are powers of two.

    Advances `state.conv` and `state.recurrent` in place, but not `state.position`, which is the host's.
    """
    key_heads = key_heads_of(inputs, weights, state)
    heads, key_dim, value_dim = state.recurrent.shape
    mixed = conv_step(inputs.qkv, state.conv, weights.conv)
    out = torch.empty(1, heads * value_dim, device=mixed.device)
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


def key_heads_of(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> int:
    """How many there are. What belongs together has the sizes that the kernels rely on."""
    (tokens, channels), (heads, key_dim, value_dim) = inputs.qkv.shape, state.recurrent.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    assert channels == 2 * key_heads * key_dim + heads * value_dim, (inputs.qkv.shape, state.recurrent.shape)
    assert heads % key_heads == 0, (heads, key_heads)
    assert inputs.z.shape == (tokens, heads * value_dim), (inputs.z.shape, inputs.qkv.shape)
    assert inputs.b.shape == inputs.a.shape == (tokens, heads), (inputs.b.shape, inputs.a.shape)
    assert weights.a_log.shape == weights.dt_bias.shape == (heads,), (weights.a_log.shape, weights.dt_bias.shape)
    assert weights.norm.shape == (value_dim,), weights.norm.shape
    assert state.recurrent.is_contiguous()
    return key_heads
