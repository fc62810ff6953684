"""What lies where: the arena first, then whole layers, then the head; slots get the RAM that is left."""

import dataclasses

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.hardware import Memory
from mosaic.runtime.simulator import budget as budget_module
from mosaic.runtime.simulator.budget import Budget, make_budget
from support.simulated import DENSE, EXPERT, GB, HEAD, TOP_K, machine, model

LEAST = 2 * TOP_K * EXPERT


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(budget_module, "PROGRAM", GB)


def card(nbytes: int, ram: int = 1 << 40):
    """A machine with so much VRAM and RAM."""
    whole = machine()
    memory = dataclasses.replace(whole.gpu.memory, size_gib=nbytes / 2**30)
    ram_memory = dataclasses.replace(whole.ram, size_gib=ram / 2**30)
    return dataclasses.replace(whole, gpu=dataclasses.replace(whole.gpu, memory=memory), ram=ram_memory)


@pytest.mark.parametrize(
    ("vram", "layers", "head"),
    [
        (LEAST, 0, False),
        (LEAST + DENSE - 2, 0, False),
        (LEAST + DENSE + 2, 1, False),
        (LEAST + 2 * DENSE + HEAD - 2, 2, False),
        (LEAST + 2 * DENSE + HEAD + 2, 2, True),
    ],
)
def test_vram_that_the_arena_leaves(vram, layers, head):
    found = make_budget(card(vram + 1), model(), LEAST, None)
    assert (found.vram_slots, found.gpu_layers, found.head_on_gpu) == (4, layers, head)


@pytest.mark.parametrize(("arena", "slots"), [(LEAST, 4), (5 * EXPERT - 1, 4), (5 * EXPERT, 5), (100 * EXPERT, 16)])
def test_slots_of_the_arena(arena, slots):
    assert make_budget(card(200 * GB), model(), arena, None).vram_slots == slots


def test_ram_holds_what_vram_does_not():
    """16 experts; the program takes 1 GB, two layers 4, the head 3."""
    assert make_budget(card(LEAST + 1), model(), LEAST, 13 * GB).ram_slots == 5
    assert make_budget(card(LEAST + 2 * DENSE + 2), model(), LEAST, 13 * GB).ram_slots == 9
    assert make_budget(card(LEAST + 2 * DENSE + HEAD + 2), model(), LEAST, 13 * GB) == Budget(4, 12, 2, True)
    assert make_budget(card(LEAST + 1), model(), LEAST, 90 * GB).ram_slots == 16
    without = dataclasses.replace(machine(), gpu=None)
    assert make_budget(without, model(), 0, 13 * GB) == Budget(0, 5, 0, False)


def test_what_a_layer_remembers_lies_beside_it():
    sizes = model()
    attention = dataclasses.replace(sizes.spec.attention, num_kv_heads=2, head_dim=8)
    sizes = dataclasses.replace(sizes, spec=dataclasses.replace(sizes.spec, attention=attention))
    remembered = sizes.remembered(0)
    assert remembered == sizes.context * 2 * 2 * 8 * 2
    assert make_budget(card(LEAST + DENSE + remembered - 2), sizes, LEAST, None).gpu_layers == 0
    assert make_budget(card(LEAST + DENSE + remembered + 2), sizes, LEAST, None).gpu_layers == 1
    assert make_budget(card(LEAST + 2), sizes, LEAST, 12 * GB + 2 * remembered).ram_slots == 4
    with pytest.raises(InputError):
        make_budget(card(LEAST + 2), sizes, LEAST, 12 * GB + 2 * remembered - 1)


def test_what_others_have_is_not_taken():
    whole = card(200 * GB)
    reserved = dataclasses.replace(whole, ram=Memory(20, 12, 4, 0.25))
    usable = make_budget(whole, model(), LEAST, 8 << 30)
    assert make_budget(reserved, model(), LEAST, None) == usable
    assert make_budget(reserved, model(), LEAST, 12 << 30).ram_slots > usable.ram_slots


@pytest.mark.parametrize(
    ("arena", "ram", "words"),
    [
        (LEAST - 1, None, "3.73 GiB to 18.63 GiB"),
        (21 * GB, None, "this VRAM for experts is not usable"),
        (LEAST, 101 * GB, "more memory than this machine has"),
        (LEAST, 5 * GB - 1, "memory does not suffice"),
    ],
)
def test_what_cannot_be_is_refused(arena, ram, words):
    make_budget(card(20 * GB, 100 * GB), model(), LEAST, 5 * GB)
    with pytest.raises(InputError, match=words):
        make_budget(card(20 * GB, 100 * GB), model(), arena, ram)
