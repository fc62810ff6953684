"""Wherever layers and experts lie, on a device or here, a model says the same, to the bit of its log-probabilities.

The device is the host's memory, its operations are the CPU's: so what could differ is what the tier does.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from mosaic.runtime import vram_items
from support.tiered import WatchedDevice, answer, answers, load

ALL = 64  # experts of four layers
LEAST = 8  # slots: two layers' experts of a token
IDS = np.random.default_rng(5).integers(0, 256, 400).tolist()


class Case(NamedTuple):
    model: str = "3.6"
    slots: int = 20
    layers: int = 4
    head: bool = True
    ram_slots: int | None = None
    kv: str = "bf16"
    prefetch: bool = False
    half: int = 16  # slots of a half of the streaming buffer


CASES = {
    "layers alone": Case(slots=0, layers=2),
    "all layers, no slots": Case(slots=0),
    "least slots alone": Case(slots=LEAST, layers=0),
    "least slots, one layer": Case(slots=LEAST, layers=1),
    "some slots alone": Case(layers=0),
    "some slots, three layers": Case(layers=3),
    "some slots, all layers": Case(),
    "without the head": Case(head=False),
    "all slots alone": Case(slots=ALL, layers=0),
    "everything": Case(slots=ALL),
    "keys and values in float32": Case(kv="f32"),
    "keys and values in E4M3": Case(kv="e4m3"),
    "E4M3, some layers": Case(kv="e4m3", layers=2),
    "least of both": Case(slots=LEAST, layers=2, ram_slots=LEAST),
    "least RAM, no layers": Case(layers=0, ram_slots=LEAST),
    "least RAM, all layers": Case(ram_slots=LEAST, half=3),
    "some RAM, prefetch": Case(ram_slots=30, prefetch=True),
    "least RAM, prefetch": Case(layers=2, ram_slots=LEAST, prefetch=True, half=5),
    "mapped, prefetch": Case(layers=3, prefetch=True),
    "halves of one": Case(half=1),
    "halves of five": Case(half=5, layers=3),
    "next": Case("next"),
    "next, some layers": Case("next", layers=2, ram_slots=12, half=3),
    "moe": Case("moe", slots=12),
    "moe, with the dense layer": Case("moe", slots=12, layers=3, kv="e4m3"),
    "moe, least RAM": Case("moe", slots=LEAST, layers=1, ram_slots=LEAST),
    "mixed kinds": Case("mixed", slots=12),
    "mixed kinds, least RAM": Case("mixed", slots=LEAST, layers=3, ram_slots=LEAST, half=3),
    "mixed kinds, no layers": Case("mixed", slots=12, layers=0),
    "no E4M3": Case("bf16", slots=0),
}


def conversation(engine) -> list[Any]:
    """Prompts of one token, of many and of several pieces, alone and in company; answers long enough to promote."""
    return [
        answer(engine, IDS[:1], 5),
        answer(engine, IDS[:150], 30),
        *answers(engine, [IDS[150:151], IDS[160:230], IDS[230:263]], 12),
        answer(engine, IDS[:17], 5),
    ]


@pytest.fixture(scope="module")
def expected(folders):
    """What the CPU alone says."""
    return cache(lambda model, kv: conversation(load(folders(model), kv=kv)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_tokens_and_the_same_bits(monkeypatch, folders, expected, case):
    monkeypatch.setattr(vram_items, "STREAM_SLOTS", case.half)
    wanted, device = expected(case.model, case.kv), WatchedDevice()
    options = {name: getattr(case, name) for name in ("slots", "layers", "head", "ram_slots", "kv", "prefetch")}
    engine = load(folders(case.model), device, **options)
    held = [name for name in device.memory.used if device.memory.used[name]]
    found = conversation(engine)
    assert found == wanted
    assert [len(said) for said in found] == [5, 30, 12, 12, 12, 5]

    traffic = engine.scheduler.traffic
    used = traffic.device_hits, device.copies("expert slots"), held.count("expert slots")
    assert all(used) if case.slots else not any(used)
    assert (device.overwritten("expert slots") > 10) == (0 < case.slots < ALL)
    streams = case.layers > 0 and case.model != "bf16"
    assert (device.copies("streaming buffer") > 0) == streams
    assert (device.overwritten("streaming buffer") > 0) == streams
    assert ("dense weights" in held) == (case.layers > 0)
    assert ("head" in held) == (case.layers == 4 and case.head)
    if case.slots < ALL:
        assert traffic.hits > 0
    if case.ram_slots:
        assert traffic.misses > 0
    if case.prefetch:
        assert traffic.foretold > 0 or not case.ram_slots


def test_a_prompt_that_is_scored_is_streamed_whole(folders):
    plain, device = load(folders("3.6")), WatchedDevice()
    engine = load(folders("3.6"), device, layers=4, slots=LEAST)
    assert engine.score(IDS[:100], IDS[100:150]) == plain.score(IDS[:100], IDS[100:150])
    assert device.copies("streaming buffer") == 2 * ALL
    assert engine.scheduler.traffic.device_bytes == ALL * (device.memory.used["expert slots"] // LEAST)
