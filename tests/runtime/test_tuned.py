"""What was tuned is used where nobody says otherwise and it still fits; and it changes no word."""

import json
from dataclasses import replace

import pytest

from mosaic.format.catalog import read_catalog
from mosaic.runtime import tuned as module
from mosaic.runtime.device.choice import DeviceChoice
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.device.part import Tuning
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.cpu import CpuOps, set_threads, threads
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.speeds import Speeds
from mosaic.runtime.tuned import UNTUNED, Tuned, keep_tuning, known_tuning, settle_threads
from mosaic.runtime.vram_items import SLACK
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes

MIB = 1 << 20
ROOM = 500 * MIB
CONTEXT = 256
HOST = "the host's memory"
ANYTHING = VramWishes()
FOUND = Tuned(threads=1, vram=2 * MIB, vram_budget=ROOM, min_hits=2, stream_tokens=64, piece=512)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's; threads as they were."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOSAIC_THREADS", raising=False)
    monkeypatch.setattr("mosaic.runtime.loading.speeds", lambda *_: Speeds(1e10, 1e9))  # that takes seconds
    before = threads()
    yield tmp_path / "mosaic"
    set_threads(before)


def device(room=ROOM):
    return HostDevice(room=room)


def loading(folder, tuned=UNTUNED, vram=ANYTHING, room=ROOM):
    choice = DeviceChoice(device(room), needed=True)
    return Loading(folder, KVFormat.BF16, context=CONTEXT, chosen=choice, vram=vram, tuned=tuned)


@pytest.fixture(scope="module")
def slot(demo):
    return ExpertPlaces(Weights(demo))[0, 0].nbytes


def test_it_is_kept_per_machine_device_and_model(demo, tiny, monkeypatch):
    catalog, other = read_catalog(demo), read_catalog(tiny)
    assert known_tuning(catalog, None) == UNTUNED
    keep_tuning(catalog, None, Tuned(threads=1))
    keep_tuning(catalog, HOST, FOUND)
    assert known_tuning(catalog, None) == Tuned(threads=1)
    assert known_tuning(catalog, HOST) == FOUND
    assert known_tuning(other, None) == known_tuning(other, HOST) == UNTUNED
    assert known_tuning(replace(catalog, plan_digest="another"), None) == UNTUNED
    keep_tuning(catalog, None, Tuned(threads=2))
    assert known_tuning(catalog, None) == Tuned(threads=2)
    for name, value in (("cores", lambda: 1000), ("isa", lambda: "other")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert known_tuning(catalog, None) == UNTUNED
    monkeypatch.setattr(module.platform, "node", lambda: "other")
    assert known_tuning(catalog, None) == UNTUNED


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '"text"',
        {"threads": "3"},
        {"threads": 0},
        {"threads": 1000},
        {"threads": True},
        {"piece": 100},
        {"min_hits": 0},
        {"vram": -1},
        [3],
        None,
    ],
    ids=str,
)
def test_what_is_damaged_was_never_found(demo, cache, damage):
    catalog = read_catalog(demo)
    keep_tuning(catalog, None, Tuned(threads=1))
    (file,) = cache.iterdir()
    if isinstance(damage, str):
        file.write_text(damage)
    else:
        ((key, kept),) = json.loads(file.read_text()).items()
        file.write_text(json.dumps({key: {**kept, **damage} if isinstance(damage, dict) else damage}))
    assert known_tuning(catalog, None) == UNTUNED
    keep_tuning(catalog, None, Tuned(threads=2))
    assert known_tuning(catalog, None) == Tuned(threads=2)


def test_settings_of_another_release(demo, cache):
    """One that is missing was not tuned; one that is not known is ignored."""
    catalog = read_catalog(demo)
    keep_tuning(catalog, None, FOUND)
    (file,) = cache.iterdir()
    ((key, kept),) = json.loads(file.read_text()).items()
    del kept["piece"], kept["layers"]
    file.write_text(json.dumps({key: {**kept, "more": "1"}}))
    assert known_tuning(catalog, None) == replace(FOUND, piece=None, layers=None)


def test_words_for_people():
    assert str(UNTUNED) == ""
    assert str(Tuned(threads=6)) == "threads 6"
    assert "expert slots 2.00 MiB, uses before a copy 2, tokens to stream for 64, tokens of a piece 512" in str(FOUND)


def test_threads_are_used_unless_somebody_says(monkeypatch):
    set_threads(2)
    assert settle_threads(CpuOps(), 2, FOUND) == replace(FOUND, threads=None)
    assert settle_threads(ReferenceOps(), None, FOUND) == replace(FOUND, threads=None)
    monkeypatch.setenv("MOSAIC_THREADS", "2")
    assert settle_threads(CpuOps(), None, FOUND) == replace(FOUND, threads=None)
    assert threads() == 2
    monkeypatch.setenv("MOSAIC_THREADS", "")
    assert settle_threads(CpuOps(), None, UNTUNED) == UNTUNED
    assert threads() == 2
    assert settle_threads(CpuOps(), None, FOUND) == FOUND
    assert threads() == 1


def test_slots_and_pieces_are_planned_as_they_were_tuned(demo, slot):
    made = loading(demo, FOUND)
    assert made.plans[1].slots == 2 * MIB // slot
    assert made.piece == 512
    assert made.tuned == FOUND
    assert made.tuning == Tuning(2, 64)
    assert loading(demo).tuning == Tuning()


@pytest.mark.parametrize("wish", [VramWishes(slots_nbytes=MIB), VramWishes(layers=2), VramWishes(piece=256)], ids=str)
def test_wishes_win(demo, slot, wish):
    made = loading(demo, FOUND, wish)
    plan = made.plans[1]
    if wish.piece:
        assert (plan.slots, plan.piece) == (2 * MIB // slot, 256)
        assert made.tuned == replace(FOUND, piece=None)
    else:  # slots and layers are one question
        assert plan.piece == 512
        assert plan.slots == (MIB // slot if wish.slots_nbytes else loading(demo, vram=wish).plans[1].slots)
        assert plan.layers == (wish.layers or len(made.weights.spec.layers))
        assert made.tuned == replace(FOUND, vram=None)


@pytest.mark.parametrize("room", [ROOM * 15 // 16 - 1, ROOM * 17 // 16 + 1])
def test_slots_tuned_for_other_memory_are_not_used(demo, room):
    made = loading(demo, FOUND, room=room)
    usual = loading(demo, room=room, vram=VramWishes(piece=512))
    assert made.plans[1] == usual.plans[1]
    assert made.tuned == replace(FOUND, vram=None)


def test_what_does_not_fit_any_more_is_not_used(demo):
    room = SLACK + 8 * MIB
    made = loading(demo, replace(FOUND, vram=10 * MIB, vram_budget=room), room=room)
    assert made.plans[1] == loading(demo, room=room).plans[1]
    assert made.tuned == replace(FOUND, vram=None, vram_budget=room, piece=None)


def answer(folder, **options):
    engine = Engine.load(folder, context=CONTEXT, **options)
    engine.scheduler.stop = frozenset()
    found = engine.generate("Tell me about Ruth 1.", max_tokens=40, temperature=0.0)
    return engine, [(chosen.token, chosen.logprob) for chosen in found.tokens], found.stats.traffic


@pytest.mark.parametrize("with_device", [False, True])
def test_an_engine_uses_what_was_tuned_and_says_the_same(demo, with_device):
    set_threads(2)
    options = {"device": device() if with_device else "cpu"}
    engine, expected, _ = answer(demo, **options, threads=2)
    assert engine.tuned == UNTUNED
    keep_tuning(read_catalog(demo), HOST if with_device else None, FOUND if with_device else Tuned(threads=1))
    options = {"device": device() if with_device else "cpu"}
    engine, found, traffic = answer(demo, **options)
    assert found == expected
    assert threads() == 1
    assert engine.tuned == (FOUND if with_device else Tuned(threads=1))
    assert (traffic.device_hits > 0) == with_device
    options = {"device": device() if with_device else "cpu"}
    engine, found, _ = answer(demo, **options, threads=2, options=LoadOptions(tuning=Tuning(3, 512)))
    assert found == expected
    assert threads() == 2
    assert engine.tuned.threads is None


def test_slots_that_leave_fewer_layers_than_they_did_are_let_alone(demo):
    """A longer context takes what layers had; then slots are not worth more than those."""
    room = loading(demo, replace(FOUND, layers=None)).plans[1]
    assert room.slots
    for layers, kept in ((room.layers, True), (room.layers + 1, False)):
        made = loading(demo, replace(FOUND, layers=layers))
        assert (made.plans[1].slots == room.slots) is kept
        assert (made.tuned.vram is not None) is kept
