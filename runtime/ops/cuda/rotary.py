"""Rotary embedding. Angles are worked out apart from it: a query and its key have the same."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """`cosines` and `sines` float32 [T, rotary_dim / 2] of T positions."""

    cosines: Tensor
    sines: Tensor


def angles(positions: Tensor, rotary_dim: int, theta: float) -> Angles:
    """Of positions [T]. In float64: of position 100,000 float32 would be off by some thousandths."""
    turned = positions.double()[:, None] * _frequencies(rotary_dim, theta, positions.device)
    return Angles(turned.cos().float(), turned.sin().float())


@cache
def _frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -rotary_dim
    return torch.pow(theta, powers)


@triton.jit
def _rotate(
    x: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    out: tl.tensor,
    token_stride: int,
    head_stride: int,
    heads: int,
    dim: int,
    half: int,
    width: tl.constexpr,
) -> None:
    token, head, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, width)
    inside, turned, second = place < dim, place < 2 * half, place >= half
    source = x + token * token_stride + head * head_stride
    value = tl.load(source + place, mask=inside, other=0.0)
    partner = tl.load(source + tl.where(second, place - half, place + half), mask=inside & turned, other=0.0)
    angle = token * half + tl.where(second, place - half, place)
    cosine = tl.load(cosines + angle, mask=turned, other=1.0)
    sine = tl.load(sines + angle, mask=turned, other=0.0)
    result = value * cosine + tl.where(second, partner, -partner) * sine
    tl.store(out + (token * heads + head) * dim + place, result, mask=inside)


def rotate(x: Tensor, turn: Angles) -> Tensor:
    """X [T, h, d] float32 with the first rotary_dim dims turned, half i against half i + rotary_dim / 2."""
    (tokens, heads, dim), half = x.shape, turn.cosines.shape[1]
    assert turn.cosines.shape == turn.sines.shape == (tokens, half), (turn.cosines.shape, turn.sines.shape)
    assert 2 * half <= dim, (half, dim)
    assert x.dtype == torch.float32, x.dtype
    assert x.stride(2) == 1
    out = torch.empty(x.shape, device=x.device)
    sizes = {"heads": heads, "dim": dim, "half": half, "width": triton.next_power_of_2(dim)}
    strides = x.stride(0), x.stride(1)
    _rotate[tokens, heads](x, turn.cosines, turn.sines, out, *strides, **sizes, num_warps=1)
    return out
