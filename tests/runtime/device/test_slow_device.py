"""Copies that land late and in any order, kernels that run on for long: a device of its own time changes no bit."""

from contextlib import suppress
from functools import cache

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import vram_items
from mosaic.runtime.device.host import Over
from support.slow_device import SlowDevice
from support.tiered import answer, answers, load

IDS = np.random.default_rng(8).integers(0, 256, 400).tolist()
PLACED = {
    "some slots, all layers": {"slots": 12, "layers": 4},
    "some slots, two layers": {"slots": 8, "layers": 2},
    "some slots alone": {"slots": 12},
    "least of all": {"slots": 8, "layers": 4, "ram_slots": 8},
}


def conversation(engine):
    return [
        answer(engine, IDS[:70], 20),
        *answers(engine, [IDS[100:140], IDS[200:203]], 10),
        answer(engine, IDS[:33], 8),
    ]


@pytest.fixture(scope="module")
def expected(folders):
    return cache(lambda: conversation(load(folders("3.6"))))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("placed", PLACED.values(), ids=PLACED)
def test_the_same_bits_at_any_time(monkeypatch, folders, expected, placed, seed):
    monkeypatch.setattr(vram_items, "STREAM_SLOTS", 3)
    device = SlowDevice(seed, pace=1 + seed)
    engine = load(folders("3.6"), device, **placed)
    assert conversation(engine) == expected()
    assert device.wrong == []
    assert engine.scheduler.traffic.device_hits > 0
    assert device.overwritten("expert slots") > 0
    assert device.overtaken > 0
    assert device.held_up > 0
    assert (device.copies("streaming buffer") > 0) == ("layers" in placed)


class Hasty(SlowDevice):
    """Begins a copy at once."""

    def upload(self, source, target, after):
        return super().upload(source, target, Over())


class Deaf(SlowDevice):
    """Begins a kernel at once."""

    def follow(self, fence):
        pass


@pytest.mark.parametrize(
    ("kind", "found"), [(Hasty, "while a kernel read it"), (Deaf, "before what it reads is there")]
)
def test_a_device_that_kept_no_order_would_be_found_out(monkeypatch, folders, kind, found):
    monkeypatch.setattr(vram_items, "STREAM_SLOTS", 1)
    device = kind()
    with suppress(InputError):  # logits of NaN codes
        conversation(load(folders("3.6"), device, slots=8, layers=4))
    assert any(found in each for each in device.wrong)
