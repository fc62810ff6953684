"""The convolution of a Gated DeltaNet: depthwise and causal, then silu; its history is changed in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.decode import silu

CHANNELS = 256  # of a program


@triton.jit
def _step(
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
def _conv(
    x: tl.tensor,
    history: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    channels: int,
    taps: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    token, channel = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    inside = channel < channels
    total = tl.zeros((tile,), tl.float32)
    for tap in tl.static_range(taps):
        source = token + tap - (taps - 1)
        if source < 0:
            value = tl.load(history + (source + taps - 1) * channels + channel, mask=inside, other=0.0)
        else:
            value = tl.load(x + source.to(tl.int64) * channels + channel, mask=inside, other=0.0)
        total += value * tl.load(weight + channel * taps + tap, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * channels + channel, silu(total), mask=inside)


def conv_step(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """As `conv` of one token, in one launch: [1, C]."""
    _check(x, history, weight)
    (_, channels), taps = x.shape, weight.shape[1]
    out = torch.empty(1, channels, device=x.device)
    _step[triton.cdiv(channels, CHANNELS),](
        x.contiguous(), history, weight, out, channels, taps=taps, tile=CHANNELS, num_warps=4
    )
    return out


def conv(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """Of x [T, C] float32 behind history [taps - 1, C]: [T, C]. The history becomes that of the next token.

    weight [C, taps], the last tap for the token itself.
    """
    _check(x, history, weight)
    (tokens, channels), taps = x.shape, weight.shape[1]
    x, out = x.contiguous(), torch.empty(tokens, channels, device=x.device)
    grid = tokens, triton.cdiv(channels, CHANNELS)
    _conv[grid](x, history, weight, out, channels, taps=taps, tile=CHANNELS, num_warps=4)
    history.copy_(torch.cat((history[tokens:], x[1 - taps :])))
    return out


def _check(x: Tensor, history: Tensor, weight: Tensor) -> None:
    channels, taps = weight.shape
    assert taps > 1
    assert x.shape[1] == channels, (x.shape, weight.shape)
    assert history.shape == (taps - 1, channels), (history.shape, weight.shape)
    assert x.dtype == history.dtype == torch.float32, (x.dtype, history.dtype)
    assert history.is_contiguous()
    assert weight.is_contiguous()
