"""Copies of experts into a faster tier, against a plain account of who has which slot, and by hand."""

import random
from collections import Counter

import pytest

from bench.routing import Kind, routing
from mosaic.runtime.experts.placement import PlacementPolicy
from mosaic.runtime.experts.promotion import Copy, Promotion
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.tracker import Tracker

LAYERS, EXPERTS, TOP_K = 4, 16, 4


class Tier:
    """A promotion, and what a test needs to know of its inside."""

    def __init__(self, num_slots: int, most: int = 4, min_hits: int = 3, window: int = 16) -> None:
        self.tracker = Tracker(window)
        self.slots = SlotPolicy(num_slots, range(LAYERS), EXPERTS, TOP_K)
        self.promotion = Promotion(self.slots, PlacementPolicy(self.tracker, 0, 1, min_hits), most)

    def place(self, *keys: int):
        self.tracker.observe(keys)
        return self.promotion.place(list(keys))

    def begin(self, *keys: int) -> list[Copy]:
        return self.promotion.begin(self.place(*keys))

    @property
    def pinned(self) -> dict[int, int]:
        return {slot: pins for slot, pins in enumerate(self.slots._pins) if pins}


def steps(draw: random.Random, seed: int):
    """The keys of each layer of each step, for one to three sequences that share experts."""
    kind = draw.choice(list(Kind))
    choices = [routing(kind, LAYERS, EXPERTS, TOP_K, seed + sequence) for sequence in range(draw.randint(1, 3))]
    while True:
        tokens = [next(each) for each in choices]
        yield [[layer * EXPERTS + int(e) for token in tokens for e in token[layer]] for layer in range(LAYERS)]


@pytest.mark.parametrize("seed", range(12))
def test_copies_land_and_are_dropped_in_any_order(seed):
    draw = random.Random(seed)
    most = draw.randint(1, 5)
    tier = Tier(draw.choice([8, 9, 13, 20, 40]), most, min_hits=draw.randint(1, 3))
    promotion, resident = tier.promotion, dict[int, int]()  # slots by key, as the test keeps account
    seen = Counter[str]()

    def settle() -> None:
        while promotion.flying and draw.random() < 0.4:
            copy = draw.choice(promotion.flying)
            if draw.random() < 0.7:
                promotion.land(copy)
                resident[copy.key] = copy.slot
                seen["landed"] += 1
            else:
                promotion.drop(copy)
                assert tier.slots.find(copy.key) is None
                seen["dropped"] += 1

    for _, layers in zip(range(150), steps(draw, seed), strict=False):
        for keys in layers:
            settle()
            placement = tier.place(*keys)
            assert placement.gpu == [key for key in dict.fromkeys(keys) if key in resident]
            assert placement.cpu == [key for key in dict.fromkeys(keys) if key not in resident]
            seen["resident"] += len(placement.gpu)
            settle()  # some of what was placed elsewhere lands, or fails, before copies begin
            before = list(promotion.flying)
            begun = promotion.begin(placement)
            assert promotion.flying == before + begun
            for copy in begun:
                assert copy.key in placement.promote
                assert copy.key not in resident
                evicted = [key for key, slot in resident.items() if slot == copy.slot]
                assert not set(evicted) & set(placement.gpu)
                seen["evicted"] += len(evicted)
                for key in evicted:
                    del resident[key]
            there = resident | {copy.key: copy.slot for copy in promotion.flying}
            assert len(there) == len(resident) + len(promotion.flying) <= len(resident) + most
            assert len(set(there.values())) == len(there)
            everything = range(LAYERS * EXPERTS)
            assert there == {key: slot for key in everything if (slot := tier.slots.find(key)) is not None}
            assert tier.pinned == {copy.slot: 1 for copy in promotion.flying}
            assert all(promotion.slot(key) == resident[key] for key in placement.gpu)
        tier.tracker.tick()
        promotion.tick()
    assert set(+seen) == {"landed", "dropped", "resident", "evicted"}


def test_a_copy_is_there_when_it_landed():
    tier = Tier(8)
    copies = tier.begin(0, 0, 0, 1, 1, 1)
    assert [copy.key for copy in copies] == [0, 1]
    assert tier.place(0, 1) == ([], [0, 1], [0, 1])
    assert tier.begin(0, 1) == []  # on their way
    tier.promotion.land(copies[1])
    assert tier.place(0, 1) == ([1], [0], [0])
    assert tier.promotion.slot(1) == copies[1].slot
    assert tier.promotion.flying == copies[:1]


def test_a_copy_that_is_dropped_may_begin_again():
    tier = Tier(8)
    (copy,) = tier.begin(0, 0, 0)
    tier.promotion.drop(copy)
    assert tier.begin(0) == [copy]  # the slot that came free last


def test_each_is_placed_once_and_counted_for_each_sequence(monkeypatch):
    tier, used = Tier(8), []
    monkeypatch.setattr(tier.slots, "use", used.append)
    assert tier.place(3, 1, 3, 2, 3, 1) == ([], [3, 1, 2], [3])
    assert used == [3, 1, 3, 2, 3, 1]


def test_no_more_are_on_their_way_than_may_be():
    tier = Tier(16, most=2)
    copies = tier.begin(*range(4), *range(4), *range(4))
    assert len(copies) == 2
    tier.promotion.land(copies[0])
    assert [copy.key for copy in tier.begin(*range(4))] == [2]


def test_what_is_on_its_way_keeps_its_slot():
    """Eight slots, all of them written to: a hotter expert finds none."""
    tier = Tier(8, most=9, min_hits=1)
    assert len(tier.begin(*range(8))) == 8
    assert tier.begin(*[8] * 9) == []


def test_a_copy_settles_once():
    tier = Tier(8)
    (copy,) = tier.begin(0, 0, 0)
    tier.promotion.land(copy)
    for settle in (tier.promotion.land, tier.promotion.drop):
        with pytest.raises(ValueError):
            settle(copy)
    assert tier.place(0).gpu == [0]
