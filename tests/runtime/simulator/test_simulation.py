"""Whole simulations: one by hand, sums that must hold, and what more memory or a faster bus may do."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.bench_simulate import BUNDLED, sizes_in
from mosaic.runtime.experts.placement import PlacementPolicy
from mosaic.runtime.experts.replay import ours
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import Trace, read_trace
from mosaic.runtime.hardware import known, load
from mosaic.runtime.simulator import simulation as module
from mosaic.runtime.simulator import tiers
from mosaic.runtime.simulator.budget import Budget
from mosaic.runtime.simulator.simulation import Outcome, simulate
from mosaic.runtime.simulator.sizes import published
from support.simulated import EXPERT, HIDDEN, machine, model, trace

LAPTOP = load("rtx4060-laptop")


def test_by_hand():
    """One layer, always the same two experts, eight tokens of which six count. A copy takes 2 seconds.

    Third token: both are promoted, and land 2 and 4 seconds later. A token takes a second of the CPU for its experts
    while one of them is cold, and half a second of other things: 0.2 dense, 0.3 head, and 0.009 to 0.011 of calls.
    """
    found = simulate(trace([[[0, 1]]] * 8), machine(), model(layers=1), Budget(4, 8, 1, True))
    cold = (
        0.2 + 2 + 0.3 + 0.011
    )  # two experts on the CPU: the third token, from whose beginning the copies take 2 and 4 s
    one = 0.2 + 1 + 0.3 + 0.011  # the fourth token begins 2.5 s after, and the fifth 4.0
    both = 0.2 + 0.2 + 0.3 + 0.009
    assert (found.hot, found.cold, found.missing, found.promoted) == (1 + 4 * 2, 2 + 1, 0, 2)
    assert sum(found.spent.values()) == pytest.approx(cold + one + 4 * both)
    assert found.tokens == 6
    assert found.tok_s == pytest.approx(6 / (cold + one + 4 * both))
    assert found.exchanged == 2 * 2 * 4 * HIDDEN
    assert found.pcie_nbytes == 2 * EXPERT + found.exchanged
    assert (found.offloaded, found.less) == (0, None)  # copied in the first token, which does not count


def test_offloading_is_the_cache_of_the_runtime_asked_for_everything(recorded, demo, monkeypatch):
    monkeypatch.setattr(module, "WARM_UP", 10**6)
    _, routing = recorded
    sizes = sizes_in(demo)
    for slots in (16, 40):
        found = simulate(routing, LAPTOP, sizes, Budget(slots, 64, len(sizes.dense), True))
        assert found.tokens == len(routing.experts)
        assert found.offloaded == routing.experts.size - ours(routing, slots)


def simulated(recorded, demo, hardware=LAPTOP, vram=32, ram=96) -> Outcome:
    sizes = sizes_in(demo)
    return simulate(recorded[1], hardware, sizes, Budget(vram, ram, len(sizes.dense), True))


def with_bus(gb_s: float):
    return dataclasses.replace(LAPTOP, gpu=dataclasses.replace(LAPTOP.gpu, pcie_gb_s=gb_s))


def test_every_lookup_and_every_byte_is_counted_once(recorded, demo, monkeypatch):
    claims = []
    claim = SlotPolicy.claim

    def counted(self, key, streaming=False):
        found = claim(self, key, streaming)
        claims.append((self, found))
        return found

    monkeypatch.setattr(module, "WARM_UP", 10**6)
    monkeypatch.setattr(SlotPolicy, "claim", counted)
    found = simulated(recorded, demo)
    by_policy = {id(policy): [] for policy, _ in claims}
    for policy, made in claims:
        by_policy[id(policy)].append(made)
    assert sorted(map(len, by_policy.values())) == sorted([found.promoted, found.missing, found.offloaded])
    assert found.hot + found.cold == recorded[1].experts.size
    assert 0 < found.promoted <= found.cold
    assert found.pcie_nbytes == found.promoted * found.expert + found.exchanged
    assert found.exchanged % (2 * 4 * sizes_in(demo).spec.hidden_size) == 0


def test_the_bus_carries_no_more_than_it_can(recorded, demo):
    """At a 1/1000 of the speed a copy never pays; in between, copies fill the time there is at most."""
    assert simulated(recorded, demo, with_bus(0.0125)).promoted == 0
    for gb_s in (0.5, 2.0, 12.5):
        found = simulated(recorded, demo, with_bus(gb_s))
        seconds = sum(found.spent.values())
        assert found.promoted * found.expert <= gb_s * 1e9 * seconds + tiers.RING * found.expert


def test_more_vram_is_no_worse(recorded, demo):
    found = [simulated(recorded, demo, vram=slots, ram=128) for slots in (8, 16, 32, 64, 128)]
    assert all(one.vram_hit_rate < other.vram_hit_rate for one, other in itertools.pairwise(found))
    assert all(one.offloaded >= other.offloaded for one, other in itertools.pairwise(found))


def test_more_ram_is_no_slower(recorded, demo):
    found = [simulated(recorded, demo, ram=slots) for slots in (16, 48, 96, 128)]
    assert all(one.ram_hit_rate < other.ram_hit_rate for one, other in itertools.pairwise(found))
    assert all(one.tok_s <= other.tok_s for one, other in itertools.pairwise(found))
    assert found[-1].missing == 0


FASTER = {
    "launches": {"gpu": dataclasses.replace(LAPTOP.gpu, layer_us=30, exchange_us=20)},
    "token": {"cpu": dataclasses.replace(LAPTOP.cpu, token_us=100)},
    "disk": {"disk": dataclasses.replace(LAPTOP.disk, read_gb_s=7)},
}


@pytest.mark.parametrize("part", FASTER)
def test_a_faster_part_is_no_slower(recorded, demo, part):
    """Those that the policy does not ask for: what is promoted is the same, but for when copies land."""
    slow, fast = (simulated(recorded, demo, each) for each in (LAPTOP, dataclasses.replace(LAPTOP, **FASTER[part])))
    assert fast.tok_s > slow.tok_s


def test_the_policy_of_the_runtime_decides(recorded, demo, monkeypatch):
    before = simulated(recorded, demo)
    monkeypatch.setattr(tiers, "PlacementPolicy", functools.partial(PlacementPolicy, min_hits=20))
    after = simulated(recorded, demo)
    assert after.promoted < before.promoted
    assert after.hot != before.hot


def test_a_gpu_that_is_no_faster_is_refused():
    with pytest.raises(InputError, match="no faster than the CPU"):
        simulate(trace([[[0, 1]]]), machine(gpu_gb_s=1), model(layers=1), Budget(4, 8, 1, True))


@pytest.mark.parametrize("name", known())
def test_every_machine_decodes_the_published_model(name):
    """Some tokens of the bundled trace."""
    routing, sizes, hardware = read_trace(BUNDLED), published(), load(name)
    short = Trace(routing.header, routing.experts[:40])
    budget = Budget(1000 if hardware.gpu else 0, 3000, 40 if hardware.gpu else 0, bool(hardware.gpu))
    found = simulate(short, hardware, sizes, budget)
    assert 1 < found.tok_s < 300
    assert found.tokens == 30
    assert (found.hot > 0) == (hardware.gpu is not None)
    assert np.isfinite(list(found.spent.values())).all()
