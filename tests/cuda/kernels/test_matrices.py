"""Products with matrices, for a few vectors and for many."""

import numpy as np
import pytest
import torch

from mosaic.format import e4m3
from mosaic.runtime.ops.cuda.matmul import matmul, matmul_plain
from mosaic.runtime.ops.cuda.matvec import matvec
from mosaic.runtime.ops.cuda.split import split
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.weights import E4M3Matrix
from support.gpu_weights import SCALES, matrix, normal, on, split_error, values
from support.rounding import Rounded

OPS = ReferenceOps()
SHAPES = [(1, 1), (3, 17), (128, 128), (130, 200), (257, 64), (64, 513)]


def vectors(x):
    """Float32's, exact."""
    return Rounded(x.double().numpy())


def tensor_cores(x, weight):
    """High and low parts are a term each; both are cut off, the scaled steps are rounded."""
    return Rounded(x.double().numpy(), split_error(x)).dot(values(weight), units=4, more=4)


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_matvec(count, shape, dtype, device):
    weight, x = matrix(shape, dtype), normal(count, shape[1], seed=7)
    expected = vectors(x).dot(values(weight))
    expected.agrees(OPS.linear(x, weight))
    expected.holds(matvec(x.to(device), on(device, weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 5])
def test_matvec_of_plain_weights(count, dtype, device):
    weight, x = normal(70, 300).to(dtype), normal(count, 300, seed=1)
    vectors(x).dot(values(weight)).holds(matvec(x.to(device), weight.to(device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (70, 300), (64, 64)], ids=str)
@pytest.mark.parametrize("tokens", [1, 65])
def test_matmul_of_plain_weights(tokens, shape, dtype, device):
    """In float32, as `test_matvec_of_plain_weights`."""
    weight, x = normal(*shape).to(dtype), normal(tokens, shape[1], seed=1)
    vectors(x).dot(values(weight)).holds(matmul_plain(x.to(device), weight.to(device)))


def test_a_vector_has_the_same_bits_in_any_company(device):
    """At equal numbers of accumulators; how many vectors a program is made for may change the order of a sum."""
    weight, x = matrix((50, 300), torch.bfloat16), normal(8, 300)
    whole = matvec(x.to(device), on(device, weight))
    vectors(x).dot(values(weight)).holds(whole)
    for count in (5, 7):
        assert torch.equal(matvec(x[8 - count :].to(device), on(device, weight)), whole[8 - count :])


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("shape", [(3, 17), (130, 200), (64, 513)], ids=str)
@pytest.mark.parametrize("tokens", [1, 130])
def test_matmul(tokens, shape, dtype, device):
    weight, x = matrix(shape, dtype), normal(tokens, shape[1], seed=7)
    x *= torch.exp2(normal(tokens, 1, seed=3, size=20.0))  # float16 alone could not hold them
    expected = tensor_cores(x, weight)
    expected.agrees(OPS.linear(x, weight))
    expected.holds(matmul(x.to(device), on(device, weight)))


@pytest.mark.parametrize("plain", [False, True])
def test_a_token_has_the_same_bits_in_any_company(plain, device):
    x, weight = normal(150, 200).to(device), normal(70, 200) if plain else matrix((70, 200), torch.bfloat16)
    product, weight = matmul_plain if plain else matmul, on(device, weight)
    whole = product(x, weight)
    for first, last in ((0, 1), (3, 70), (149, 150), (64, 128)):
        assert torch.equal(product(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("product", [matvec, matmul])
@pytest.mark.parametrize("place", [0, 77, 127])
def test_every_code_is_decoded_exactly(place, product, device):
    """Row r holds code r at one place and 0 elsewhere; the scales are of both ends of the range."""
    held = torch.zeros(256, 128, dtype=torch.uint8)
    held[:, place] = torch.arange(256)
    known = torch.from_numpy(~e4m3.is_nan(np.arange(256, dtype=np.uint8)))
    held[~known] = 0
    for scale in (1.0, e4m3.SMALLEST_NORMAL_BF16 * 2**9, e4m3.LARGEST_SCALE):
        weight = E4M3Matrix(held, torch.full((2, 1), scale))
        found = product(torch.ones(1, 128, device=device), on(device, weight)).cpu().double().numpy()[0]
        expected = np.where(known, e4m3.VALUES.astype(np.float64), 0) * scale
        assert np.array_equal(found, expected)


def test_values_stay_where_their_scale_is(device):
    """Every block has a scale and every block of columns an activation of its own; all sums are exact."""
    weight = E4M3Matrix(torch.full((256, 384), 0x38, dtype=torch.uint8), torch.exp2(torch.arange(6.0)).view(2, 3))
    x = torch.exp2(-4 * torch.arange(3.0)).repeat_interleave(128)[None]
    expected = (weight.scales @ x.view(3, 128).sum(1)).repeat_interleave(128)
    for product in (matvec, matmul):
        assert torch.equal(product(x.to(device), on(device, weight)).cpu()[0], expected)


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-120, 1e-30, 1.0, 1e30, 2.0**127])
def test_split(size, device):
    x = normal(4, 100).clamp(-1.99, 1.99) * size
    x[1, 1:] = 0
    x[2] *= torch.exp2(-torch.arange(100.0) / 4)
    x[3] = 0
    pieces = split(x.to(device))
    high, low, factors = (part.cpu().double().numpy() for part in (pieces.high, pieces.low, pieces.factors))
    error = np.abs((high + low) * 2.0**-14 * factors[:, None] - x.double().numpy())
    tiny = 2.0**-25 * 2.0**-126  # float16's smallest steps, in rows that cannot be scaled any further
    assert (error <= split_error(x) + tiny).all()
    assert np.abs(high).max() < 2.0**15
