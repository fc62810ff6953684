"""Seconds by hand. The CPU reads 1 GB/s, the GPU 10, PCIe 0.5, the disk 0.25; an expert has 1 GB, a layer 2."""

import dataclasses

import pytest

from mosaic.runtime.simulator.budget import Budget
from mosaic.runtime.simulator.costs import Call, Costs
from support.simulated import HIDDEN, machine, model

ALL = Costs(machine(), model(), Budget(4, 8, 2, True))  # both layers in VRAM
HALF = Costs(machine(), model(), Budget(4, 8, 1, False))
NONE = Costs(dataclasses.replace(machine(), gpu=None), model(), Budget(0, 8, 0, False))


def told(spent) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in spent.items() if seconds}


def test_an_expert():
    assert (ALL.gpu, ALL.cpu, ALL.copy, ALL.disk) == (0.1, 1, 2, 4)
    assert (NONE.gpu, NONE.cpu, NONE.copy, NONE.disk) == (0, 1, 0, 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call(0, 0, 0, 0), {"calls and exchanges": 0.001}),
        (Call(2, 0, 0, 0), {"experts, GPU": 0.2, "calls and exchanges": 0.001}),
        (Call(7, 1, 0, 3), {"experts, CPU": 1, "calls and exchanges": 0.003}),
        (Call(20, 2, 0, 0), {"experts, GPU": 2, "calls and exchanges": 0.003}),  # as long as the CPU's: not in a sum
        (Call(0, 2, 1, 0), {"experts, CPU": 2, "waiting for the disk": 3, "calls and exchanges": 0.003}),
        (Call(0, 9, 1, 0), {"experts, CPU": 9, "calls and exchanges": 0.003}),  # read while the others compute
        (Call(0, 4, 1, 0), {"experts, CPU": 4, "waiting for the disk": 1, "calls and exchanges": 0.003}),
        (Call(60, 4, 1, 0), {"experts, GPU": 6, "calls and exchanges": 0.003}),
    ],
)
def test_a_layer_in_vram(call, expected):
    assert told(ALL.layer(0, call)) == {"dense, GPU": 0.2, **expected}


@pytest.mark.parametrize(
    ("call", "calls"), [(Call(0, 2, 0, 0), 0.004), (Call(1, 2, 0, 0), 0.007), (Call(30, 2, 0, 0), 0.007)]
)
def test_a_layer_in_ram(call, calls):
    """4 ms of the CPU; of the GPU 1 and 2 for the exchange, if it has an expert."""
    found = told(HALF.layer(1, call))
    assert found["dense, CPU"] == 2
    assert found["calls and exchanges"] == calls
    assert told(HALF.layer(0, call))["dense, GPU"] == 0.2


def test_without_a_gpu():
    assert told(NONE.layer(0, Call(0, 2, 0, 0))) == {"dense, CPU": 2, "experts, CPU": 2, "calls and exchanges": 0.004}
    assert told(NONE.token()) == {"dense, CPU": 3, "calls and exchanges": 0.008}


def test_a_token():
    assert told(ALL.token()) == {"dense, GPU": 0.3, "calls and exchanges": 0.008}
    assert told(HALF.token()) == {"dense, CPU": 3, "calls and exchanges": 0.008}


def test_states_cross_where_two_compute():
    both_ways = 2 * 4 * HIDDEN
    assert [ALL.exchanged(0, Call(hot, cold, 0, 0)) for hot, cold in ((2, 0), (1, 1), (0, 2))] == [
        0, both_ways, both_ways,
    ]  # fmt: skip
    assert [HALF.exchanged(1, Call(hot, cold, 0, 0)) for hot, cold in ((2, 0), (1, 1), (0, 2))] == [
        both_ways, both_ways, 0,
    ]  # fmt: skip


def test_what_a_layer_remembers_is_read():
    sizes = model()
    attention = dataclasses.replace(sizes.spec.attention, num_kv_heads=2, head_dim=1 << 12)
    sizes = dataclasses.replace(sizes, spec=dataclasses.replace(sizes.spec, attention=attention))
    costs = Costs(machine(), sizes, Budget(4, 8, 2, True))
    added = costs.layer(0, Call(0, 0, 0, 0))["dense, GPU"] - 0.2
    assert added == pytest.approx(sizes.context * 2 * 2 * (1 << 12) * 2 / 10e9)
