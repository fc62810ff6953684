"""Experts on loan: their bytes are those of the file until they are given back, whatever the store goes through."""

import os
import random
import shutil

import numpy as np
import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.experts import arena, cached, slots, store
from mosaic.runtime.experts.arena import Arena
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING
from mosaic.runtime.experts.recorded import RecordedExperts, open_recording
from mosaic.runtime.source_weights import SourceWeights
from mosaic.runtime.weights import Weights
from support.interrupts import InterruptAt
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

SIZES = {"interval": 2, "mtp": False, "visual": False}  # four layers of 16 experts, 4 for a token
MODELS = {"e4m3": Tiny(**SIZES), "bf16": Tiny(**SIZES, moe_inter=72)}
LAYERS, EXPERTS, TOP_K = 4, 16, 4
LEAST = 2 * TOP_K  # slots
TRACED = {module.__file__ for module in (arena, cached, slots, store)}


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    write_checkpoint(MODELS[request.param], root / "source")
    convert_folder(root / "source", root / "out")
    return root / "source"


@pytest.fixture(scope="module")
def folder(source):
    return source.parent / "out"


@pytest.fixture(scope="module")
def truth(folder):
    """Span and scales of every expert, as files have them."""
    places = ExpertPlaces(Weights(folder))
    found = {}
    for key in places:
        place, shard = places[key], (folder / places[key].shard).read_bytes()
        ends = place.offset + place.span_nbytes, place.scale_offset + place.scale_nbytes
        found[key] = shard[place.offset : ends[0]], shard[place.scale_offset : ends[1]]
    return found


def content(loan):
    return loan.span.tobytes(), loan.scales.tobytes()


class Store(CachedExperts):
    """Asked for layers of random experts; every span it brings is compared."""

    def __init__(self, folder, truth, slots=LEAST, seed=0):
        places = ExpertPlaces(Weights(folder))
        super().__init__(places, Arena(places, folder, slots))
        self.truth, self.draw = truth, random.Random(seed)

    def layer(self, layer, experts=None, tokens=1):
        experts = experts or self.draw.sample(range(EXPERTS), TOP_K)
        self.observe(layer, np.array([experts]))
        came = []
        for group in self.arriving(layer, experts, tokens):
            for expert, weights in group.items():
                parts = (getattr(part, "codes", part) for part in (weights.gate, weights.up, weights.down))
                codes = b"".join(part.flatten().view(torch.uint8).numpy().tobytes() for part in parts)
                assert codes == self.truth[layer, expert][0]
                came.append(expert)
        assert sorted(came) == sorted(experts)

    def pressure(self, rounds=4):
        """Every slot that can be had is written to, for answers and for a prompt."""
        for layer in [*range(LAYERS)] * rounds:
            self.layer(layer)
        for layer in range(LAYERS):
            self.layer(layer, [*range(EXPERTS)], tokens=100)

    def pinned(self):
        """Slots, when no read is on its way and the store has seen what was given back."""
        self.layer(0)
        while self._arena.flying:
            self._let_land(self._arena.flying, wait=True)
        return [slot for slot, pins in enumerate(self._arena.policy._pins) if pins]


def test_a_mapped_expert_is_lent_as_it_lies_in_its_shard(folder, truth):
    experts = MappedExperts(Weights(folder), check=True)
    loans = {key: experts.lend(*key) for key in truth}
    assert {key: content(loan) for key, loan in loans.items()} == truth
    assert all(loan.sound for loan in loans.values())
    loans[0, 0].give_back()
    assert experts.traffic.hits == 0


def test_a_damaged_expert_is_not_lent(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    place = ExpertPlaces(Weights(copy))[1, 2]
    with (copy / place.shard).open("r+b") as stream:
        stream.seek(place.offset)
        byte = stream.read(1)[0]
        stream.seek(place.offset)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(InputError, match="expert 2 of layer 1 is damaged"):
        MappedExperts(Weights(copy), check=True).lend(1, 2)


def test_a_checkpoint_lends_nothing(source):
    assert SourceWeights(source).lend(0, 0) is None


def test_a_recording_store_passes_loans_on(folder, truth, tmp_path):
    weights = Weights(folder)
    with open_recording(tmp_path / "a.trace", ExpertPlaces(weights), "a model") as writer:
        assert content(RecordedExperts(MappedExperts(weights), writer).lend(3, 4)) == truth[3, 4]


def test_what_is_not_there_is_not_lent(folder, truth):
    experts = Store(folder, truth)
    assert experts.lend(0, 5) is None
    assert experts._arena.begin((0, 5))  # on its way
    assert experts.lend(0, 5) is None


def test_nothing_is_lent_within_a_layer(folder, truth):
    experts = Store(folder, truth)
    groups = experts.arriving(0, [1, 2], 1)
    for _ in groups:
        assert experts.lend(0, 1) is None
    assert content(experts.lend(0, 1)) == truth[0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_no_pressure_overwrites_what_is_lent(folder, truth, seed):
    """In the smallest arena, with as many loans as copies to a faster tier may have."""
    experts = Store(folder, truth, seed=seed)
    layer = seed % LAYERS
    experts.layer(layer, [3, 1, 12, 7])
    traffic = experts.traffic
    loans = {(layer, expert): experts.lend(layer, expert) for expert in [3, 1, 12, 7][: min(RING, TOP_K)]}
    assert experts.traffic == traffic
    experts.pressure()
    assert all(content(loan) == truth[key] and loan.sound for key, loan in loans.items())
    for loan in loans.values():
        loan.give_back()
    assert experts.pinned() == []
    experts.pressure()
    assert any(content(loan) != truth[key] for key, loan in loans.items())  # their slots have been taken since


def test_no_more_is_lent_than_leaves_room_for_a_layer(folder, truth):
    experts = Store(folder, truth)
    experts.layer(0, [0, 1, 2, 3])
    experts.layer(1, [0, 1, 2, 3])
    loans = [experts.lend(0, expert) for expert in range(TOP_K)]
    assert experts.lend(1, 0) is None
    experts.layer(2)
    loans[2].give_back()
    experts.layer(1, [5])
    assert content(experts.lend(1, 5)) == truth[1, 5]


def test_lent_twice_is_kept_until_it_is_given_back_twice(folder, truth):
    experts = Store(folder, truth)
    experts.layer(0, [5])
    first, second = experts.lend(0, 5), experts.lend(0, 5)
    first.give_back()
    experts.pressure()
    assert content(second) == truth[0, 5]
    second.give_back()
    assert experts.pinned() == []


def test_what_nobody_holds_is_given_back(folder, truth):
    """Ctrl-C may come between the loan and whoever was to note it."""
    experts = Store(folder, truth)
    experts.layer(0, [5, 6, 7, 8])
    held = experts.lend(0, 5)
    for _ in range(2 * TOP_K):
        assert experts.lend(0, 6)
    assert len(experts.pinned()) == 1
    experts.pressure()
    assert content(held) == truth[0, 5]


def test_a_read_that_fails_leaves_loans_as_they_are(folder, truth, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    experts = Store(copy, truth)
    experts.layer(0, [5, 6])
    loan = experts.lend(0, 5)
    os.utime(copy / experts._places[2, 0].shard, ns=(0, 0))
    with pytest.raises(InputError, match="changed while the model was running"):
        experts.layer(2)
    for _ in range(3):
        for layer in (0, 1, 3):
            experts.layer(layer)
    assert loan.sound
    assert content(loan) == truth[0, 5]
    loan.give_back()
    assert experts.pinned() == []


@pytest.mark.parametrize("seed", range(30))
def test_ctrl_c_at_any_line_leaves_loans_that_know_whether_they_are_sound(folder, truth, seed):
    """Whatever says that it is sound has its bytes; what does not can be given back; and no slot stays held."""
    experts = Store(folder, truth, LEAST + seed % 5, seed)
    draw = random.Random(seed)
    interrupted, loans = 0, {}
    for line in draw.choices(range(1, 1500), k=8):
        try:
            with InterruptAt(line, TRACED):
                for layer in range(LAYERS):
                    experts.layer(layer, tokens=draw.choice([1, 100]))
                    for expert in range(EXPERTS):
                        if loan := experts.lend(layer, expert):
                            loans[loan] = (layer, expert)
                    for loan in draw.sample([*loans], len(loans) // 2):
                        loan.give_back()
                        del loans[loan]
        except KeyboardInterrupt:
            interrupted += 1
        assert all(content(loan) == truth[key] for loan, key in loans.items() if loan.sound)
        experts.layer(0)
        assert all(content(loan) == truth[key] for loan, key in loans.items() if loan.sound)
    assert interrupted
    for loan in loans:
        loan.give_back()
    assert experts.pinned() == []
    experts.pressure()
