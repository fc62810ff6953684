"""The tier alone: any routing, any mixture of calls, copies that land at any time, and Ctrl-C; or the plain sums."""

import random
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mosaic.runtime.experts import hot, placement, promotion, slots, streaming, tier, tracker, uploads
from mosaic.runtime.experts.expert_slots import expert_slots
from mosaic.runtime.experts.hot import Costs
from mosaic.runtime.experts.store import LayerExperts, Loan, PresentExperts
from mosaic.runtime.experts.tier import Tier, TierMemory
from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.weights import E4M3Matrix, Expert
from support.experts import Arriving
from support.gpu_weights import matrix, normal
from support.interrupts import InterruptAt
from support.late_device import LateDevice

LAYERS, EXPERTS, TOP_K = (0, 1, 3), 12, 3
HIDDEN, INNER = 40, 24
TRACED = {module.__file__ for module in (hot, placement, promotion, slots, streaming, tier, tracker, uploads)}
GONE = 0xFF  # NaN as a code, NaN as a BF16 of two
STREAMED = 6  # tokens
PLAIN = 1  # the layer whose experts are not E4M3


def new_expert(layer, number):
    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    if layer == PLAIN:
        return Expert(*(normal(*shape, seed=number).bfloat16() for shape in shapes))
    seed = 1000 * layer + 10 * number
    return Expert(*(matrix(shape, torch.bfloat16, seed + part, top=0) for part, shape in enumerate(shapes)))


class Places(dict):
    """What a tier asks of ExpertPlaces."""

    layers, num_experts, top_k = LAYERS, EXPERTS, TOP_K


PLACES = Places(
    ((layer, number), SimpleNamespace(kind=("BF16", "-") if layer == PLAIN else ("F8_E4M3", "BF16")))
    for layer in LAYERS
    for number in range(EXPERTS)
)


class StoppedError(Exception):
    """In place of whatever may stop a layer half way."""


class Store(PresentExperts):
    """Experts come in groups of any size, and are gone with the group; loans are gone when they are given back.

    Some are not lent, some loans are not sound, some layers are stopped.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw, self.lent = draw, list[tuple[weakref.ref[Loan], np.ndarray]]()
        self.experts = {key: new_expert(*key) for key in PLACES}

    def observe(self, layer, chosen, elsewhere=()):
        self.wanted = {expert for expert in chosen.ravel().tolist() if expert not in elsewhere}
        for loan, span in self.lent:
            if not on_loan(loan):
                span.fill(GONE)

    def arriving(self, layer, experts, tokens):
        assert self.wanted.issuperset(experts)
        source = Arriving({number: self.experts[layer, number] for number in experts}, self.draw.randint(1, 9))
        for group in source.arriving(experts, tokens):
            here = {number: copied(expert) for number, expert in group.items()}
            yield here
            for part in (part for expert in here.values() for part in vars(expert).values()):
                getattr(part, "codes", part).view(torch.uint8).fill_(GONE)
        if self.draw.random() < 0.02:
            raise StoppedError

    def lend(self, layer, expert):
        assert layer != PLAIN
        if self.draw.random() < 0.2:
            return None
        parts, sound = vars(self.experts[layer, expert]).values(), self.draw.random() < 0.9
        loan = Loan(joined(part.codes for part in parts), joined(part.scales for part in parts), sound)
        if not sound:
            loan.span.fill(GONE)
        self.lent.append((weakref.ref(loan), loan.span))
        return loan


def on_loan(known):
    return (loan := known()) is not None and not loan.given_back


def copied(expert):
    parts = vars(expert).values()
    return Expert(*(E4M3Matrix(p.codes.clone(), p.scales) if isinstance(p, E4M3Matrix) else p.clone() for p in parts))


def joined(tensors):
    return np.concatenate([tensor.flatten().view(torch.uint8).numpy() for tensor in tensors])


def choices(draw, popular, shared):
    """Of a token of one or several sequences, or of a piece of a prompt: [.., T, R], a shared one last or not."""
    shape = draw.choice([(1,), (1,), (1,), (3, 1), (2, 1), (2,), (STREAMED - 1,), (STREAMED,), (40,)])
    chosen = np.full((*shape, TOP_K + shared), EXPERTS)
    for row in chosen.reshape(-1, TOP_K + shared):
        row[:TOP_K] = draw.sample(popular if draw.random() < 0.8 else range(EXPERTS), TOP_K)
    return chosen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a finalizer
@pytest.mark.parametrize("seed", range(6))
def test_any_routing(seed):
    draw, uniform = random.Random(seed), torch.Generator().manual_seed(seed)
    device, host, store = LateDevice(seed, pace=draw.randint(2, 4)), CpuOps(), Store(draw)

    def memory(item, count):
        empty = partial(device.memory.empty, item)
        return expert_slots(empty, count, HIDDEN, INNER, torch.bfloat16)

    held = memory("expert slots", draw.choice([6, 7, 11, 20]))
    buffer = memory("streaming buffer", draw.choice([2, 4, 10])) if seed % 4 else None
    mixings = Tier(device, host, PLACES, TierMemory(held, buffer), Costs(1, 1, draw.randint(1, 3)), STREAMED)
    shared = {layer: new_expert(9, layer) for layer in LAYERS} if seed % 2 else {}
    popular, stopped, struck = range(EXPERTS), 0, 0
    for step in range(180):
        popular = popular if step % 9 else draw.sample(range(EXPERTS), draw.randint(TOP_K, 6))
        for layer in LAYERS:
            chosen = choices(draw, popular, bool(shared))
            x = torch.rand(*chosen.shape[:-1], HIDDEN, generator=uniform) - 0.5
            routing = Routing(torch.from_numpy(chosen), torch.rand(chosen.shape, generator=uniform))
            experts = {number: store.experts[layer, number] for number in range(EXPERTS)}
            wanted = host.experts(x, routing, Arriving(experts | {EXPERTS: shared.get(layer)}))
            also = host.swiglu(x, *vars(shared[layer]).values()) if shared else None
            mixing = mixings.from_host if draw.random() < 0.3 else mixings.from_device
            device.mix(held)
            ctrl_c = InterruptAt(draw.randint(1, 2500), TRACED, opcodes=True) if draw.random() < 0.3 else nullcontext()
            try:
                with ctrl_c:
                    found = mixing(x, routing, also, LayerExperts(store, layer, EXPERTS, shared.get(layer)))
            except StoppedError:
                stopped += 1
            except KeyboardInterrupt:
                struck += 1
            else:
                assert torch.equal(found, wanted)
    traffic = mixings.traffic(store.traffic)
    assert device.wrong == []
    assert min(traffic.device_hits, traffic.device_bytes, device.held_up, stopped, struck - 30) > 0
    assert device.overwritten("expert slots") > 0
    assert (device.copies("streaming buffer") > 0) == (buffer is not None)
    assert sum(on_loan(loan) for loan, _ in store.lent) <= TOP_K


def test_what_a_store_was_told_of_slots_ends_with_them():
    device, store = LateDevice(0, pace=1), Store(SimpleNamespace(random=lambda: 0.5, randint=max))  # nothing is stopped
    held = expert_slots(partial(device.memory.empty, "expert slots"), 6, HIDDEN, INNER, torch.bfloat16)
    mixings = Tier(device, CpuOps(), PLACES, TierMemory(held, None), Costs(1, 1, 1))
    routing, source = Routing(torch.tensor([[2, 5, 7]]), torch.ones(1, TOP_K)), LayerExperts(store, 0, EXPERTS, None)
    views = []
    store.observe = lambda layer, chosen, elsewhere=(): views.append(elsewhere)
    store.wanted = {2, 5, 7}
    for _ in range(10_000):  # a copy lands when its thread has come to it
        mixings.from_device(torch.ones(1, HIDDEN), routing, None, source)
        if 5 in views[0]:
            break
    assert 5 in views[0]
    assert 3 not in views[0]
    mixings.retune(1, STREAMED)
    assert 5 not in views[0]
    mixings.close()
