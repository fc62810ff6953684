"""Trials on a model: settings reach it, bits stay, what a device cannot hold costs more than anything."""

import math
import weakref

import pytest

from mosaic.format.errors import InputError
from mosaic.recipes import SAMPLE_TEXT
from mosaic.runtime import tuning_trials as module
from mosaic.runtime.device.choice import HOST_ONLY, DeviceChoice
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading
from mosaic.runtime.ops.cpu import CpuOps, set_threads, threads
from mosaic.runtime.speeds import Speeds
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.tuning import Climb
from mosaic.runtime.vram_items import SLACK
from mosaic.runtime.wishes import VramWishes

MIB = 1 << 20
CONTEXT = 1024
NUM_TOKENS = 512
ANYTHING, SOME = VramWishes(), VramWishes(slots_nbytes=2 * MIB)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("mosaic.runtime.loading.speeds", lambda *_: Speeds(1e10, 1e9))
    monkeypatch.setattr(module, "MOST_TOKENS", 16)
    before = threads()
    yield
    set_threads(before)


@pytest.fixture(scope="module")
def tokens(demo):
    return Tokenizer(demo).encode(SAMPLE_TEXT.read_text()[:8192])


class Place:
    """A device that can be found again and again, each time when nothing is left of it; `found`: its memory each time.

    A GPU's recordings, for one, hold the model that they are of.
    """

    def __init__(self, room):
        self.room = room
        self.found = []
        self._last = lambda: None

    def __call__(self):
        assert self._last() is None
        device = HostDevice(room=self.room)
        self._last = weakref.ref(device)
        self.found.append(device.memory)
        return DeviceChoice(device, needed=True)


def rig(folder, tokens, place=None, vram=ANYTHING, context=CONTEXT, ram=None):
    find = place or (lambda: HOST_ONLY)
    loading = Loading(folder, KVFormat.BF16, context=context, chosen=find(), vram=vram, ram=ram)
    made = module.Rig(loading, vram, CpuOps, find, tokens)
    assert made.write(NUM_TOKENS) > 0
    return made


def test_without_a_device_threads_are_tuned(demo, tokens, monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 4)
    set_threads(2)
    made = rig(demo, tokens)
    (knob,) = made.knobs(())
    assert (knob.name, knob.values) == ("threads", [1, 2, 3, 4])
    assert made.settings == {"threads": 2}
    for count in (3, 1):
        assert 0 < made.decode({"threads": count}, 1) < 1
        assert threads() == count
    assert made.knobs({"threads"}) == []


def test_with_a_device_all_of_it_is(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 100 * MIB))
    knobs = {knob.name: knob for knob in made.knobs({"threads"})}
    assert list(knobs) == ["min_hits", "stream_tokens"]  # all layers fit beside all experts, all prompts are one piece
    assert made.settings["piece"] == 2048
    assert all(made.settings[name] in knob.values for name, knob in knobs.items())
    assert knobs["stream_tokens"].values[-2:] == [CONTEXT, 2 * CONTEXT]
    longer = rig(demo, tokens, Place(SLACK + 100 * MIB), context=2048)
    assert next(knob.values for knob in longer.knobs(()) if knob.name == "piece") == [256, 512, 1024, 2048]


def test_slots_are_weighed_against_layers(demo, tokens):
    place = Place(SLACK + 32 * MIB)
    made = rig(demo, tokens, place)
    (knob,) = (knob for knob in made.knobs(()) if knob.name == "vram")
    taken = []
    for nbytes in knob.values:
        assert 0 < knob.cost({**made.settings, "vram": nbytes}, 0) < math.inf
        used = place.found[-1].used
        assert used.get("expert slots", 0) == nbytes
        taken.append(used.get("dense weights", 0))
    assert len(taken) > 2
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[-1] == 0
    assert len(place.found) == 1 + len(taken)
    assert "vram" not in {knob.name for knob in made.knobs({"vram"})}


def test_bits_are_those_of_the_plain_cpu_whatever_is_set(demo, tokens):
    plain, there = rig(demo, tokens), rig(demo, tokens, Place(SLACK + 100 * MIB), SOME)
    assert plain._text == there._text
    assert plain._sums == there._sums
    assert len(plain._text) == 16
    usual = there.settings
    for changed in ({}, {"min_hits": 1}, {"vram": 4 * MIB}, {"vram": 0}, {"threads": 1, "min_hits": 2}):
        assert there.decode({**usual, **changed}, 0) < 1  # it compares the bits itself:
    there._sums[5] += 1
    with pytest.raises(RuntimeError, match="other bits"):
        there.decode(usual, 0)


def test_slots_are_empty_at_the_start_of_every_trial(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 100 * MIB), SOME)
    made._count = 16
    hits = []
    for min_hits in (1, 20):
        before = made._loaded.traffic().device_hits
        made.decode({**made.settings, "min_hits": min_hits}, 0)
        hits.append(made._loaded.traffic().device_hits - before)
    assert hits[0] > hits[1] == 0


def test_prompts_are_streamed_from_the_threshold_on(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 100 * MIB), SOME)

    def copied(threshold, length):
        before = made._loaded.traffic().device_bytes
        assert made.read({**made.settings, "stream_tokens": threshold}, length) > 0
        return made._loaded.traffic().device_bytes - before

    assert copied(128, 128) > 0
    assert copied(256, 128) == 0


def test_longer_pieces_take_no_memory_of_anything_else(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 26 * MIB), context=4096, vram=VramWishes(layers=2))
    piece = made.settings["piece"]
    (knob,) = (knob for knob in made.knobs(()) if knob.name == "piece")
    assert piece < 2048
    assert knob.cost({**made.settings, "piece": 2048}, 1024) == math.inf
    assert 0 < knob.cost({**made.settings, "piece": 256}, 256) < math.inf


def test_a_device_that_has_less_now_costs_more_than_anything(demo, tokens):
    place = Place(SLACK + 100 * MIB)
    made = rig(demo, tokens, place, SOME)
    place.room = SLACK
    assert made.decode({**made.settings, "vram": 4 * MIB}, 0) == math.inf
    place.room = SLACK + 100 * MIB
    assert made.decode(made.settings, 0) < 1
    place.room = SLACK
    assert made.read({**made.settings, "vram": 4 * MIB}, 64) == math.inf


def test_experts_stay_in_ram_as_they_were_loaded(demo, tokens, monkeypatch):
    """Read from the disk into slots of RAM, of which a device has borrowed some when its part is taken anew."""
    monkeypatch.setattr("mosaic.runtime.ram_items.resident_memory", lambda: 200 * MIB)
    context, place = 256, Place(SLACK + 100 * MIB)

    def slots(ram):
        return Loading(demo, KVFormat.BF16, context=context, chosen=place(), vram=SOME, ram=ram).plan.slots

    ram = next(ram for ram in range(300 * MIB, 200 * MIB, -MIB) if (slots(ram) or 1000) < 100)
    made = rig(demo, tokens, place, SOME, context=context, ram=ram)
    experts = made._experts
    assert isinstance(experts, CachedExperts)
    for nbytes in (4 * MIB, 2 * MIB, MIB):
        assert made.decode({**made.settings, "vram": nbytes, "min_hits": 1}, 0) < 1
        assert made._loaded.experts is experts
    plain = rig(demo, tokens, context=context)
    assert plain._sums == made._sums


def test_a_short_context_is_enough(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 100 * MIB), context=8)
    assert {knob.name for knob in made.knobs(())} <= {"threads", "min_hits"}
    assert made.decode(made.settings, 0) < 1
    alone = rig(demo, tokens, context=2)
    assert alone.decode(alone.settings, 0) < 1


def test_a_climb_leaves_a_model_that_says_the_same(demo, tokens):
    made = rig(demo, tokens, Place(SLACK + 32 * MIB))
    climb = Climb(made.knobs({"threads"}), made.settings, math.inf)
    climb.run()
    assert all(found.finished for found in climb.found.values())
    assert made.decode(climb.settings, 0) < 1


def test_a_plan_that_cannot_be_moved_is_refused(demo):
    place = Place(SLACK + 100 * MIB)
    loading = Loading(demo, KVFormat.BF16, context=CONTEXT, chosen=place())
    assert loading.vram_plan(VramWishes(slots_nbytes=2 * MIB)).slots < loading.plans[1].slots
    assert loading.vram_plan(VramWishes(slots_nbytes=1)) is None
    plan, place.room = loading.plan, SLACK
    with pytest.raises(InputError, match="nothing of this model"):
        loading.move(place, ANYTHING)
    place.room = SLACK + 100 * MIB
    loading.move(place, SOME)
    assert loading.plan == plan
    assert loading.plans[1].items["expert slots"] <= 2 * MIB
