"""Resident experts for a few tokens and for many, and the sum of their outputs."""

import numpy as np
import pytest
import torch

from mosaic.format import e4m3
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.cuda.experts import add_outputs, apply_experts
from mosaic.runtime.ops.cuda.grouped import PAIRS, apply_experts_grouped, tiles_of
from mosaic.runtime.ops.reference import ReferenceOps
from support.experts import Arriving
from support.gpu_weights import SCALES, codes, normal, scales, split_error, values
from support.rounding import Rounded

SLOTS, RANKS = 6, 3
SHAPES = [(130, 140), (70, 30)]
ABSENT = 7.0  # what outputs hold where nobody writes


def held(hidden, inner, dtype, seed=0):
    """Experts with scales small enough for SwiGLU to bend."""
    rows, columns = e4m3.grid((inner, hidden))
    parts = codes(SLOTS, 3 * inner * hidden, seed=seed), scales(SLOTS, 3 * rows * columns, dtype=dtype, top=-7)
    return ExpertSlots(*parts, hidden, inner)


def on(device, experts):
    return ExpertSlots(experts.codes.to(device), experts.scales.to(device), experts.hidden, experts.inner)


def chosen(tokens, seed=0, absent=True):
    """Different slots for each token; some -1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(SLOTS, generator=generator)[:RANKS] for _ in range(tokens)])
    if absent:
        slots[torch.rand(slots.shape, generator=generator) < 0.2] = -1
    return slots.int()


def few(x, matrix):
    return x.dot(matrix)


def many(x, matrix):
    """As two float16, in tensor cores."""
    cut = split_error(torch.from_numpy(x.value))
    return Rounded(x.value, x.error + cut).dot(matrix, units=4, more=4)


FORMS = [(apply_experts, few, 2), (apply_experts_grouped, many, PAIRS + 9)]


def outputs_of(x, slots, experts, product):
    """What the outputs should be, and by how much they may be off."""
    value, error = np.full((*slots.shape, experts.hidden), ABSENT), np.zeros((*slots.shape, experts.hidden))
    for slot in range(SLOTS):
        tokens, ranks = np.nonzero(slots.numpy() == slot)
        gate, up, down = (values(weight) for weight in vars(experts.experts[slot]).values())
        vectors = Rounded(x.double().numpy()[tokens])
        inner = product(vectors, gate).silu() * product(vectors, up)
        found = product(inner, down)
        value[tokens, ranks], error[tokens, ranks] = found.value, found.error
    return Rounded(value, error)


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("apply", "product", "tokens"), FORMS, ids=["few", "many"])
def test_outputs(apply, product, tokens, shape, dtype, device):
    experts, x, slots = held(*shape, dtype), normal(tokens, shape[0], seed=5), chosen(tokens)
    found = torch.full((*slots.shape, shape[0]), ABSENT, device=device)
    apply(x.to(device), slots.to(device), on(device, experts), found)
    outputs_of(x, slots, experts, product).holds(found)


@pytest.mark.parametrize(("apply", "product", "tokens"), FORMS, ids=["few", "many"])
def test_their_sum_is_the_reference(apply, product, tokens, device):
    """By the same formula; and added up in routing order, to the bit."""
    experts, x, slots = held(130, 140, torch.bfloat16), normal(tokens, 130), chosen(tokens, absent=False)
    weights = normal(tokens, RANKS, seed=2).abs()
    found = torch.empty(tokens, RANKS, 130, device=device)
    apply(x.to(device), slots.to(device), on(device, experts), found)
    total = add_outputs(found, weights.to(device))
    outputs = outputs_of(x, slots, experts, product)
    expected = (outputs * Rounded(weights.double().numpy()[..., None])).sum(1)
    source = Arriving({slot: experts.experts[slot] for slot in range(SLOTS)})
    expected.agrees(ReferenceOps().experts(x, Routing(slots.long(), weights), source))
    expected.holds(total)


def test_outputs_are_added_in_their_order(device):
    """Large ones that cancel: another order would give another sum."""
    outputs = torch.tensor([2.0**24, 1.0, -(2.0**24), 3.0], device=device)[None, :, None].expand(2, 4, 300)
    weights = torch.tensor([[1.0, 1, 1, 1], [0, 1, 0, 1]], device=device)
    found = add_outputs(outputs.contiguous(), weights)
    assert found[0].eq(3.0).all()  # 2^24 + 1 is 2^24
    assert found[1].eq(4.0).all()


def test_a_token_has_the_same_bits_in_any_company(device):
    experts, x, slots = on(device, held(70, 30, torch.bfloat16)), normal(60, 70).to(device), chosen(60).to(device)
    for apply in (apply_experts_grouped, apply_experts):
        spans = ((0, 60), (0, 1), (13, 50)) if apply is apply_experts_grouped else ((0, 3), (0, 1), (1, 3))
        results = []
        for first, last in spans:
            found = torch.full((last - first, RANKS, 70), ABSENT, device=device)
            apply(x[first:last].contiguous(), slots[first:last].contiguous(), experts, found)
            results.append(found)
        for (first, last), found in zip(spans[1:], results[1:], strict=True):
            assert torch.equal(found, results[0][first:last])


@pytest.mark.parametrize("tokens", [1, 2, PAIRS, 200])
@pytest.mark.parametrize("case", ["mixed", "one", "none"])
def test_tiles(case, tokens, device):
    """Every pair that has a slot is in exactly one tile of that slot; a slot's pairs keep their order."""
    slots = chosen(tokens)
    if case != "mixed":
        slots[:] = SLOTS - 1 if case == "one" else -1
    tiles = tiles_of(slots.to(device), SLOTS)
    flat, seen = slots.flatten(), {slot: [] for slot in range(SLOTS)}
    for slot, first, last in zip(*(part.tolist() for part in (tiles.slots, tiles.first, tiles.last)), strict=True):
        if slot >= 0:
            assert 0 < last - first <= PAIRS
            seen[slot] += tiles.order[first:last].tolist()
    assert seen == {slot: torch.nonzero(flat == slot).flatten().tolist() for slot in range(SLOTS)}
