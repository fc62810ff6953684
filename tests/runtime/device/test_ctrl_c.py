"""Ctrl-C at any instruction of a step with experts on their way: then it answers as one that was never stopped."""

import gc
import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from mosaic.runtime import home, model, vram_items
from mosaic.runtime.device import states
from mosaic.runtime.experts import (
    arena,
    cached,
    hot,
    mapped,
    placement,
    promotion,
    slots,
    store,
    streaming,
    tier,
    tracker,
    uploads,
)
from mosaic.runtime.layers import feed_forward
from support.interrupts import InterruptAt
from support.late_device import LateDevice
from support.tiered import answer, answers, load

IDS = np.random.default_rng(9).integers(0, 256, 200).tolist()
COPYING = (hot, promotion, streaming, tier, uploads)
STEPS = (*COPYING, arena, cached, feed_forward, home, mapped, model, placement, slots, states, store, tracker)
FAR = 1 << 40


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "uploads"}


def talk(engine):
    """Streams a prompt, promotes and evicts in answers; what is kept does not shorten the next one."""
    said = answer(engine, IDS[:18], 4), answers(engine, [IDS[30:32], IDS[40:42]], 3)
    while engine.scheduler.cache.evict():
        pass
    return said


@pytest.fixture(scope="module")
def wanted(folders):
    return talk(load(folders("small")))


@pytest.mark.parametrize(("modules", "rounds"), [(STEPS, 6), (COPYING, 12)], ids=["steps", "copying"])
@pytest.mark.parametrize("placed", [{"layers": 2}, {"layers": 1, "ram_slots": 8, "prefetch": True}, {"ram_slots": 20}])
def test_ctrl_c_at_any_instruction(monkeypatch, folders, wanted, placed, modules, rounds):
    """Nothing is read from a slot that another's copy, begun before, still goes to; no thread is left or lost."""
    monkeypatch.setattr(vram_items, "STREAM_SLOTS", 3)
    draw, device, others = random.Random(rounds), LateDevice(rounds, pace=5), set(threads())
    engine = load(folders("small"), device, slots=8, **placed)
    files = {module.__file__ for module in modules}
    assert talk(engine) == wanted  # a first time takes more steps than those that follow
    with InterruptAt(FAR, files, opcodes=True) as counting:
        assert talk(engine) == wanted
    wrong, struck = set[str](), 0
    for _ in range(rounds):
        interrupt = InterruptAt(draw.randint(1, FAR - counting._left), files, opcodes=True)
        with suppress(KeyboardInterrupt), interrupt:  # when prompts and answers take turns otherwise, it may not come
            talk(engine)
        struck += bool(interrupt.where)
        if talk(engine) != wanted or len(threads() - others) != 2:
            wrong.add(interrupt.where)
    assert not wrong, f"interrupted before these lines, what comes is wrong: {sorted(wrong)}"
    assert device.wrong == []
    assert struck > rounds / 2
    hits = engine.scheduler.traffic.device_hits
    assert [talk(engine) for _ in range(5)] == 5 * [wanted]
    assert engine.scheduler.traffic.device_hits > hits  # copies begin and land as ever
    del engine
    gc.collect()
    assert not threads() - others
