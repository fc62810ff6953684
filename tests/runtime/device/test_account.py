"""What is taken of a device is what was planned, to the byte, and nothing is taken later."""

import random

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import vram_items
from mosaic.runtime.device.choice import DeviceChoice
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.engine import Engine
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.weights import E4M3Matrix
from mosaic.runtime.wishes import VramWishes
from support.tiered import EAGER, WatchedDevice, answers, load

IDS = np.random.default_rng(10).integers(0, 256, 600).tolist()
ITEMS = {
    *("expert slots", "streaming buffer", "dense weights", "head"),
    *("keys and values", "page tables", "recurrent states"),
}


def drawn(folder, draw, most, layers):
    """A load of a model with anything wished of it, on a device of up to `most` bytes on which that fits."""
    while True:
        device = HostDevice(room=vram_items.SLACK + draw.randrange(most))
        loading = Loading(
            folder,
            draw.choice(list(KVFormat)),
            context=draw.choice((1, 64, 65, 128, 400, 1000)),
            parallel=draw.randint(1, 4),
            chosen=DeviceChoice(device, needed=True),
            vram=VramWishes(draw.choice((None, None, 0, 1 << 20, 3 << 20)), draw.choice(layers)),
        )
        try:
            return device, loading, loading.plans[1]
        except InputError:
            continue


@pytest.mark.parametrize("model", ["3.6", "next", "moe", "mixed", "bf16"])
def test_what_is_taken_is_what_was_planned(folders, model):
    draw = random.Random(model)
    seen = set[str]()
    for megabytes, layers in ((20, (None, 0)), (20, (0, 1)), (20, (None, 2)), (200, (None, 3)), (2000, (4,))):
        device, loading, plan = drawn(folders(model), draw, megabytes << 20, layers)
        loaded = loading.load(CpuOps(), LoadOptions(tuning=EAGER))
        engine = Engine(folders(model), Tokenizer(folders(model)), loading, loaded)
        used = device.memory.used
        assert {item: used.get(item, 0) for item in ITEMS} == {item: plan.items[item] for item in ITEMS}
        assert used.keys() <= ITEMS
        assert sum(used.values()) <= plan.total <= plan.budget
        prompts = [IDS[first : first + min(90, plan.context - 2)] for first in range(0, 300, 100)]
        if plan.context > 1:
            answers(engine, prompts, 3)
        assert device.memory.used == used
        seen |= {item for item in used if used[item]}
    missing = {"moe": {"recurrent states"}, "bf16": {"expert slots", "streaming buffer"}}
    assert seen == ITEMS - missing.get(model, set())


def test_every_weight_of_the_device_is_in_its_memory(folders):
    """Whatever its operations know for good, they were given from there."""
    device = WatchedDevice()
    answers(load(folders("3.6"), device, slots=8, layers=4), [IDS[:40], IDS[50:60]], 9)
    known = [weight for table in (device.ops._matrices, device.ops._floats) for weight, _ in table.values()]
    matrices = [part for expert, _ in device.ops._experts.values() for part in vars(expert).values()]
    assert {place(device, weight) for weight in known} == {"dense weights", "head"}
    assert {place(device, matrix) for matrix in matrices} == {"expert slots", "streaming buffer"}


def place(device, weight):
    """Where a weight lies, scales and all."""
    parts = (weight.codes, weight.scales) if isinstance(weight, E4M3Matrix) else (weight,)
    (found,) = {device.memory.item(part) for part in parts}
    return found
