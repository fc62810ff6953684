"""Weights and vectors to test kernels with, and their exact values."""

import numpy as np
import torch

from mosaic.format import e4m3
from mosaic.runtime.weights import E4M3Matrix
from support.rounding import UNIT

SCALES = [torch.bfloat16, torch.float32]


def normal(*shape, seed=0, size=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def codes(*shape, seed=0):
    """All codes but NaN, at random."""
    found = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    found[(found & 0x7F) == e4m3.NAN_CODE] = 0x2A
    return found


def scales(*shape, dtype, seed=0, top=4):
    """Scales that differ widely: 16 octaves up to 2^top."""
    powers = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 16 - 16 + top
    return torch.exp2(powers).to(dtype)


def matrix(shape, dtype, seed=0, top=4):
    return E4M3Matrix(codes(*shape, seed=seed), scales(*e4m3.grid(shape), dtype=dtype, seed=seed + 1, top=top))


def on(device, weight):
    if isinstance(weight, E4M3Matrix):
        return E4M3Matrix(weight.codes.to(device), weight.scales.to(device))
    return weight.to(device)


def values(weight):
    """In float64, as docs/FORMAT.md has it."""
    if not isinstance(weight, E4M3Matrix):
        return weight.double().numpy()
    rows, columns = weight.shape
    spread = weight.scales.double().numpy().repeat(e4m3.BLOCK, 0).repeat(e4m3.BLOCK, 1)[:rows, :columns]
    return e4m3.VALUES.astype(np.float64)[weight.codes.numpy()] * spread


def split_error(x):
    """What float32 loses as the sum of two float16 (`mosaic.runtime.ops.cuda.split`): 2^-22 of each."""
    sizes = np.abs(x.double().numpy())
    return 4 * UNIT * sizes + 2.0**-39 * sizes.max(axis=-1, keepdims=True)
