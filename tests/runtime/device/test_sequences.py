"""What sequences remember on a device: kept, resumed, given up, written to files; always as on the CPU alone."""

import random

import numpy as np
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.device.states import DeviceCache, DeviceDelta
from mosaic.runtime.request import Request
from support.tiered import SAMPLING, WatchedDevice, answer, answers, load

IDS = np.random.default_rng(6).integers(0, 256, 2000).tolist()
PLACED = [("3.6", 4), ("3.6", 2), ("moe", 4), ("next", 3)]


def turn(engine, prompt, count, boundaries=()):
    """An answer, and how much of the prompt was known."""
    generation = engine.scheduler.submit(
        Request(prompt, SAMPLING, seed=3, max_tokens=count, logprobs=1, boundaries=boundaries)
    )
    return list(engine.scheduler.tokens(generation)), generation.stats.reused_tokens


def chat(engine):
    """Three turns, each of which goes on from the last; the second is then said otherwise."""
    first, _ = turn(engine, IDS[:100], 9, [90])
    prompt = [*IDS[:100], *(chosen.token for chosen in first), *IDS[100:140]]
    second = turn(engine, prompt, 7, [130])
    other = turn(engine, [*IDS[:90], *IDS[200:220]], 5)
    third = turn(engine, [*prompt, *(chosen.token for chosen in second[0]), *IDS[300:310]], 8)
    return [first, second, other, third]


@pytest.mark.parametrize(("model", "layers"), PLACED)
def test_turns_go_on_from_what_is_kept(folders, model, layers):
    device = WatchedDevice()
    engine = load(folders(model), device, slots=12, layers=layers)
    said = chat(engine)
    assert said == chat(load(folders(model)))
    assert all(reused >= 90 for _, reused in said[1:])
    states = [state for _, snapshot in engine.scheduler.cache.items() for state in snapshot.layers[:layers]]
    for state in states:
        if isinstance(state, DeviceDelta):  # parked
            assert device.memory.item(state.conv) is device.memory.item(state.recurrent) is None
        elif isinstance(state, DeviceCache):
            assert {device.memory.item(page.values) for page in state.pages} == {"keys and values"}
    assert {type(state) for state in states} == {DeviceCache} | ({DeviceDelta} if model != "moe" else set())


@pytest.mark.parametrize("layers", [4, 2])
def test_requests_that_are_given_up(folders, layers):
    """While their prompt is read, while they answer, alone and in company: their places are free at once."""
    plain, engine = load(folders("3.6")), load(folders("3.6"), WatchedDevice(), slots=12, layers=layers)
    for round_ in range(6):
        requests = [Request(IDS[first : first + 120], SAMPLING, seed=1, max_tokens=20) for first in (0, 300, 600)]
        generations = [engine.scheduler.submit(request) for request in requests]
        for _ in range(round_):
            engine.scheduler.step()
        for generation in generations[round_ % 2 :]:
            engine.scheduler.cancel(generation)
    assert engine.scheduler.active > 0
    prompts = [IDS[700:770], IDS[800:803], IDS[900:1000]]
    assert answers(engine, prompts, 9) == answers(plain, prompts, 9)


@pytest.mark.parametrize(("model", "layers"), PLACED)
def test_kept_states_give_way_to_sequences(folders, model, layers):
    """On a device that has just as many pages as sequences may need, any of them is answered."""
    device = load(folders(model), WatchedDevice(), slots=8, layers=layers, context=128)
    engines = [load(folders(model), context=128), device]
    evicted = [0, 0]
    draw, calls = random.Random(layers), []
    for _ in range(5):
        lengths = [draw.randint(1, 127) for _ in range(draw.randint(1, 4))]
        begins = [draw.choice((0, 0, 500, draw.randrange(1000))) for _ in lengths]
        calls.append([IDS[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)])
    found = []
    for number, engine in enumerate(engines):
        cache, evict = engine.scheduler.cache, engine.scheduler.cache.evict
        cache.budget = 1 << 30  # so that only pages are short

        def counted(evict=evict, number=number):
            evicted[number] += 1
            return evict()

        cache.evict = counted
        found.append([answers(engine, prompts, 7) for prompts in calls])
    assert found[0] == found[1]
    assert evicted[1] > 3


@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
@pytest.mark.parametrize(("model", "layers"), PLACED)
def test_sessions_move_between_device_and_cpu(folders, tmp_path, model, layers, kv):
    """The files are the same to the byte, and whoever loads one goes on with the same bits."""
    engines = {
        "cpu": load(folders(model), kv=kv),
        "device": load(folders(model), WatchedDevice(), slots=12, layers=layers, kv=kv),
    }
    for name, engine in engines.items():
        answer(engine, IDS[:150], 20)
        engine.save_session(tmp_path / name, {"of": "both"})
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "device").read_bytes()
    prompt = [*engines["cpu"].scheduler.cache.items()[-1][0], *IDS[150:170]]
    wanted = turn(engines["cpu"], prompt, 15)
    assert wanted[1] > 150
    others = [load(folders(model), kv=kv), load(folders(model), WatchedDevice(), slots=8, layers=layers, kv=kv)]
    for engine in others:
        assert engine.load_session(tmp_path / "device") == {"of": "both"}
        assert turn(engine, prompt, 15) == wanted


def refusal(engine, file):
    """What was found; nothing of the error is left, since its traceback has pages."""
    with pytest.raises(InputError, match="cannot read a session") as caught:
        engine.load_session(file)
    return caught.value.facts["found"]


def test_a_session_that_the_device_has_no_pages_for(folders, tmp_path):
    """Two chats of all of the context, in place of one and what is kept of it."""
    many = load(folders("3.6"), parallel=3, context=512)
    for first in (0, 500):
        answer(many, IDS[first : first + 500], 5)
    assert many.scheduler.cache.longest(IDS[:500], 500)  # now used last
    many.save_session(tmp_path / "two")
    engine = load(folders("3.6"), WatchedDevice(), layers=4, slots=8, parallel=1, context=512)
    before = answer(engine, IDS[:30], 5)
    assert refusal(engine, tmp_path / "two") == "the device has no more memory for keys and values"
    assert answer(engine, IDS[:30], 5) == before
    assert answer(engine, IDS[:500], 5) == answer(many, IDS[:500], 5)


def test_a_session_takes_the_place_of_what_is_kept(folders, tmp_path):
    """One that fits the device does, whatever was said before."""
    plain = load(folders("3.6"), parallel=1, context=512)
    said = answer(plain, IDS[:490], 10)
    plain.save_session(tmp_path / "chat")
    engine = load(folders("3.6"), WatchedDevice(), layers=4, slots=8, parallel=1, context=512)
    answer(engine, IDS[500:990], 10)
    engine.load_session(tmp_path / "chat")
    prompt = [*IDS[:490], *(chosen.token for chosen in said[:-1]), 5, 6, 7]
    found = turn(engine, prompt, 5)
    assert found == turn(plain, prompt, 5)
    assert found[1] > 490
