"""Experts from an arena that is too small for them: the same bits as from memory, whatever happens on the way."""

import os
import shutil
import sys

import numpy as np
import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.experts.arena import Arena, slot_nbytes
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.weights import Weights
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

#: Layers of 16 experts, 4 for a token. BF16 experts of odd sizes are neither in whole pages nor on one.
MODELS = {
    "e4m3": Tiny(interval=2, mtp=False, visual=False),
    "bf16": Tiny(interval=2, mtp=False, visual=False, moe_inter=72),
    "dense-between": Tiny(family="qwen3_moe", mlp_only_layers=(1,)),
}
IDS = np.random.default_rng(3).integers(0, 256, 90).tolist()
PROMPT = 60


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    write_checkpoint(MODELS[request.param], root / "source")
    return convert_folder(root / "source", root / "out")


@pytest.fixture(scope="module")
def e4m3(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    write_checkpoint(MODELS["e4m3"], root / "source")
    return convert_folder(root / "source", root / "out")


@pytest.fixture
def copy(e4m3, tmp_path):
    """Of the model, to be written to."""
    return shutil.copytree(e4m3, tmp_path / "model")


def cached(folder, slots, ops=None, **options):
    """A model whose dense weights are resident and whose experts have so many slots."""
    weights = Weights(folder)
    weights.make_resident()
    places = ExpertPlaces(weights)
    experts = CachedExperts(places, Arena(places, folder, slots, **options))
    return HybridModel(weights, ops or CpuOps(), KVFormat.F32, experts), experts


def logits(model, first=PROMPT, ids=IDS):
    """After a prompt and after each of the tokens that follow, fed one by one."""
    state = model.new_sequence()
    parts = [model.logits(model.hidden(ids[:first], state))]
    parts += [model.logits(model.hidden([token], state)) for token in ids[first:]]
    return torch.cat(parts)


@pytest.fixture(scope="module")
def expected(folder):
    return logits(HybridModel(Weights(folder), CpuOps(), KVFormat.F32))


@pytest.mark.parametrize("slots", [8, 9, 13, 16, 17, 31, 48, 64])
def test_the_same_bits_with_any_number_of_slots(folder, expected, slots):
    model, experts = cached(folder, slots)
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    assert experts.traffic.hits > 0 or slots < 16
    assert experts.traffic.misses > 0


def test_the_same_bits_by_the_reference(folder):
    ids = IDS[:12]
    plain = logits(HybridModel(Weights(folder), ReferenceOps(), KVFormat.F32), 8, ids)
    assert torch.allclose(logits(cached(folder, 8, ReferenceOps())[0], 8, ids), plain, rtol=0, atol=1e-12)


def test_with_a_slot_for_each_every_expert_is_read_once(folder):
    places = ExpertPlaces(Weights(folder))
    model, experts = cached(folder, len(places))
    logits(model)
    misses = experts.traffic.misses
    before = experts._arena.nbytes_read
    assert before >= misses * places[places.layers[0], 0].span_nbytes
    logits(model)
    assert experts.traffic.misses == misses
    assert experts._arena.nbytes_read == before


def test_a_prompt_reads_each_expert_once_per_layer(folder):
    """Be there ever so few slots."""
    model, experts = cached(folder, 8)
    state = model.new_sequence()
    model.hidden(IDS, state)
    assert experts.traffic.misses <= len(experts._places)


def test_what_was_foretold_is_read_ahead_and_changes_nothing(folder, expected):
    model, experts = cached(folder, 40)
    layers = experts._places.layers
    arriving, rng = experts.arriving, np.random.default_rng(0)

    def foretelling(layer, numbers, tokens):
        """Foretells the next layer at random, which is right for a quarter of the experts."""
        following = layers[(layers.index(layer) + 1) % len(layers)]
        experts.expect(following, rng.permutation(16)[:4].tolist())
        yield from arriving(layer, numbers, tokens)

    experts.arriving = foretelling
    assert torch.equal(logits(model), expected)
    traffic = experts.traffic
    assert 0 < traffic.ahead_used < traffic.ahead
    assert 0 < traffic.foretold_right < traffic.foretold


def test_what_a_faster_tier_has_is_not_read_ahead(folder):
    _, experts = cached(folder, 40)
    first, second = experts._places.layers[:2]

    def step(layer, chosen, elsewhere=(), tokens=1):
        experts.observe(layer, np.array([chosen] * tokens), elsewhere)
        wanted = [expert for expert in chosen if expert not in elsewhere]
        for _ in experts.arriving(layer, wanted, tokens) if wanted else ():
            pass

    hot = {1, 2}
    step(second, [1, 3], hot)
    hot.add(4)  # since then
    experts.expect(second, [1, 2, 4, 5])
    step(first, [6])
    assert experts.traffic.ahead == 1
    step(second, [1, 2, 4], hot)  # nothing is asked for, so that 5 was read in vain
    assert (experts.traffic.ahead_used, experts.traffic.foretold) == (0, 0)
    assert not experts._ahead
    step(first, [*range(16)], tokens=3)  # a prompt: the whole next layer is read ahead
    assert {key for key in experts._ahead if key[1] in hot} == set()
    assert experts.traffic.ahead > 8


@pytest.mark.parametrize("taken", range(1, 5))
def test_an_interrupted_layer_leaves_nothing_behind(folder, expected, taken):
    """As by Ctrl-C, with reads on their way: their slots come back, or there would be none left."""
    model, experts = cached(folder, 8)
    for layer in experts._places.layers * 3:
        groups = experts.arriving(layer, [3, 1, 12, 7], 1)
        for _ in range(taken):
            next(groups, None)
        groups.close()
    assert torch.equal(logits(model), expected)


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line that is run of the files that decide and move bytes."""

    FILES = ("arena.py", "cached.py", "slots.py")

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self.FILES) or "runtime/experts" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("seed", range(30))
def test_ctrl_c_at_any_line_changes_nothing_that_follows(folder, expected, seed):
    """Several times in a row, in the midst of claims, reads and releases."""
    model, _ = cached(folder, 9 + seed % 5)
    rng = np.random.default_rng(seed)
    interrupted = 0
    for line in rng.integers(1, 4000, 6).tolist():
        sys.settrace(InterruptAt(line))
        try:
            model.hidden(IDS[: int(rng.integers(1, 40))], model.new_sequence())
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
    assert interrupted
    assert torch.equal(
        logits(model, 20, IDS[:40]), logits(HybridModel(Weights(folder), CpuOps(), KVFormat.F32), 20, IDS[:40])
    )


def test_embedding_rows_of_a_file_that_was_written_to_are_refused(copy):
    model, _ = cached(copy, 8)
    model.hidden(IDS[:5], model.new_sequence())
    os.utime(copy / "outside.safetensors", ns=(0, 0))
    with pytest.raises(InputError, match="changed while the model was running") as caught:
        model.hidden(IDS[:5], model.new_sequence())
    assert "outside.safetensors" in str(caught.value)


def test_experts_of_checked_sums_are_the_same(folder, expected):
    assert torch.equal(logits(cached(folder, 12, check=True)[0]), expected)


def damage(folder, places, key):
    place = places[key]
    with (folder / place.shard).open("r+b") as stream:
        stream.seek(place.offset + 5)
        byte = stream.read(1)
        stream.seek(place.offset + 5)
        stream.write(bytes([byte[0] ^ 1]))


def test_a_damaged_expert_is_found_when_sums_are_checked(copy):
    places = ExpertPlaces(Weights(copy))
    for layer, expert in places:
        damage(copy, places, (layer, expert))
    model, _ = cached(copy, 20, check=True)
    for _ in range(2):  # and again: it is not taken for good
        with pytest.raises(InputError, match=r"expert \d+ of layer 0 is damaged") as caught:
            logits(model)
        assert "layers-00.safetensors" in str(caught.value)


def test_a_shard_that_is_written_to_is_refused(copy):
    model, _ = cached(copy, 8)
    state = model.new_sequence()
    model.hidden(IDS[:5], state)
    os.utime(copy / "layers-02.safetensors", ns=(0, 0))
    for _ in range(3):  # again and again: what was read after the change is not taken for good
        with pytest.raises(InputError, match="changed while the model was running") as caught:
            model.hidden(IDS[5:6], state)
        assert "layers-02.safetensors" in str(caught.value)


def test_a_shard_that_becomes_shorter_is_refused(copy):
    model, _ = cached(copy, 8)
    state = model.new_sequence()
    model.hidden(IDS[:5], state)
    os.truncate(copy / "layers-01.safetensors", 4096)
    with pytest.raises(InputError, match="changed while the model was running"):
        model.hidden(IDS[5:6], state)


def test_a_read_that_fails_is_told_and_the_expert_is_asked_for_again(copy):
    """Shorter behind the index's back between the check and the read: what the reader finds is told all the same."""
    _, experts = cached(copy, 8)
    arena = experts._arena
    places = experts._places
    os.truncate(copy / "layers-00.safetensors", places[0, 9].offset)
    assert arena.begin((0, 9))
    with pytest.raises(InputError, match="changed while"):
        arena.land([(0, 9)], wait=True)
    assert not arena.flying
    assert not arena.has((0, 9))


def test_a_model_that_is_deleted_or_replaced_runs_on(copy, e4m3):
    expected = logits(HybridModel(Weights(e4m3), CpuOps(), KVFormat.F32))
    model, _ = cached(copy, 8)
    shutil.rmtree(copy)
    assert torch.equal(logits(model), expected)


def test_too_few_slots_are_refused(e4m3):
    with pytest.raises(ValueError, match="two layers need 8"):
        cached(e4m3, 7)


def test_slots_are_whole_pages(folder):
    places = ExpertPlaces(Weights(folder))
    assert slot_nbytes(places) % 4096 == 0
    assert slot_nbytes(places) >= max(places[key].span_nbytes for key in places)
