"""Norms, router, rotary embedding, gates."""

import numpy as np
import pytest
import torch

from mosaic.runtime.ops.cuda.gates import sigmoid_gate, swiglu_between
from mosaic.runtime.ops.cuda.norms import add_rms_norm, rms_norm
from mosaic.runtime.ops.cuda.rotary import angles, rotate
from mosaic.runtime.ops.cuda.router import route
from mosaic.runtime.ops.reference import ReferenceOps
from support.gpu_weights import normal
from support.rounding import UNIT, Rounded

OPS = ReferenceOps()


def normed(x, weight, eps, offset):
    count = x.value.shape[-1]
    mean = (x * x).sum(-1) * Rounded(1 / count, 4 * UNIT / count) + eps  # a division
    factor = Rounded(weight.double().numpy()) + offset
    return x * mean.inverse_root()[..., None] * factor


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "size"), [((1, 1), 1.0), ((3, 100), 1e-4), ((2, 5, 256), 1.0), ((2, 2048), 1e4)])
def test_rms_norm(shape, size, dtype, offset, device):
    eps = 1e-6
    x, weight = normal(*shape, size=size), normal(shape[-1], seed=1).to(dtype)
    expected = normed(Rounded(x.double().numpy()), weight, eps, offset)
    expected.agrees(OPS.rms_norm(x, weight, eps, offset))
    expected.holds(rms_norm(x.to(device), weight.to(device), eps, offset))


def test_rows_may_have_gaps(device):
    """As those of queries with a gate behind each."""
    x, weight = normal(3, 4, 40), normal(20, seed=1)
    queries = x.to(device)[..., :20]
    expected = normed(Rounded(x[..., :20].double().numpy()), weight, 1e-6, 1.0)
    expected.holds(rms_norm(queries, weight.to(device), 1e-6, 1.0))


def test_add_rms_norm(device):
    x, y, weight = normal(3, 100), normal(3, 100, seed=1), normal(100, seed=2)
    total = Rounded(x.double().numpy()) + Rounded(y.double().numpy())
    found = add_rms_norm(x.to(device), y.to(device), weight.to(device), 1e-6, 1.0)
    total.holds(found[0])
    normed(total, weight, 1e-6, 1.0).holds(found[1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (60, 4), (256, 8), (100, 100)])
def test_route(experts, top_k, normalize, shared, device):
    logits, gate = normal(5, experts, size=3.0), normal(5, 1, seed=1, size=3.0) if shared else None
    logits[1] = 0.5  # all equal
    logits[2] = logits[2].round()  # many of them
    logits[3] *= 20  # shares that vanish
    logits[4, 1:] = -3e38
    reference = OPS.route(logits.double(), top_k, normalize, None if gate is None else gate.double())
    found = route(logits.to(device), top_k, normalize, None if gate is None else gate.to(device))
    assert torch.equal(found.experts.cpu(), reference.experts)
    exact = Rounded(logits.double().numpy())
    share = (exact - exact.value.max(-1, keepdims=True)).exp()
    picked = np.take_along_axis(share.value, reference.experts.numpy()[:, :top_k], 1)
    picked = Rounded(picked, np.take_along_axis(share.error, reference.experts.numpy()[:, :top_k], 1))
    weights = picked * (picked if normalize else share).sum(-1).reciprocal()[:, None]
    weights.agrees(reference.weights[:, :top_k])
    weights.holds(found.weights[:, :top_k])
    if gate is not None:
        Rounded(gate.double().numpy()).sigmoid().holds(found.weights[:, top_k:])


@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), [(1, 2, 2), (3, 20, 8), (4, 256, 64), (2, 128, 128)])
def test_rotate(heads, dim, rotary_dim, device):
    """Sine and cosine are rounded to float32 once; their arguments are float64's."""
    positions = torch.tensor([0, 1, 77, 262_143])
    x = normal(4, heads, 2 * dim)[..., :dim]
    turn = angles(positions.to(device), rotary_dim, 1e7)
    found = rotate(x.to(device), turn)
    power = np.arange(0, rotary_dim, 2) / -rotary_dim
    angle = positions.numpy()[:, None, None] * 1e7**power
    cosine, sine = (Rounded(part, UNIT * np.abs(part)) for part in (np.cos(angle), np.sin(angle)))
    first, second = (Rounded(part.double().numpy()) for part in x[..., :rotary_dim].chunk(2, dim=-1))
    half = rotary_dim // 2
    (first * cosine - second * sine).holds(found[..., :half])
    (second * cosine + first * sine).holds(found[..., half:rotary_dim])
    assert torch.equal(found.cpu()[..., rotary_dim:], x[..., rotary_dim:])
    assert np.allclose(found.cpu().numpy(), OPS.rotate(x, positions, rotary_dim, 1e7).numpy(), atol=1e-5)


@pytest.mark.parametrize(("shape", "gates"), [((1, 1), 1), ((3, 700), 700), ((2, 5, 40), 40), ((3, 700), 1)])
def test_sigmoid_gate(shape, gates, device):
    x, gate = normal(*shape, size=3.0), normal(*shape[:-1], gates, seed=1, size=30.0)
    expected = Rounded(x.double().numpy()) * Rounded(gate.double().numpy()).sigmoid()
    expected.agrees(OPS.sigmoid_gate(x, gate))
    expected.holds(sigmoid_gate(x.to(device), gate.to(device)))


def test_gates_with_gaps_between_their_rows(device):
    """As torch.chunk gives them, of a projection to queries and gates, or to gates and ups."""
    both = normal(3, 4, 80, size=3.0)
    first, second = both.chunk(2, dim=-1)
    exact = [Rounded(part.double().numpy()) for part in (first, second)]
    parts = both.to(device).chunk(2, dim=-1)
    (exact[0] * exact[1].sigmoid()).holds(sigmoid_gate(*parts))
    (exact[0].silu() * exact[1]).holds(swiglu_between(*parts))


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (2, 5, 40)])
def test_swiglu_between(shape, device):
    gate, up = normal(*shape, size=10.0), normal(*shape, seed=1)
    expected = Rounded(gate.double().numpy()).silu() * Rounded(up.double().numpy())
    expected.holds(swiglu_between(gate.to(device), up.to(device)))
