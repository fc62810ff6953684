"""The rolling window against a recount, and which experts are worth a copy."""

import random

import pytest

from mosaic.runtime.experts.placement import PlacementPolicy
from mosaic.runtime.experts.tracker import Tracker


@pytest.mark.parametrize("window", [1, 2, 7])
def test_uses_are_those_of_the_last_tokens(window):
    draw = random.Random(window)
    tracker = Tracker(window)
    tokens: list[list[int]] = [[]]
    for _ in range(300):
        if draw.random() < 0.3:
            tracker.tick()
            tokens.append([])
        else:
            keys = draw.choices(range(8), k=3)
            tracker.observe(keys)
            tokens[-1] += keys
        recount = [sum(used.count(key) for used in tokens[-window:]) for key in range(8)]
        assert [tracker.uses(key) for key in range(8)] == recount
    assert max(recount) > 0


def test_a_window_holds_a_token():
    with pytest.raises(ValueError, match="0 tokens"):
        Tracker(0)


def used(**uses: int) -> Tracker:
    tracker = Tracker(10)
    for name, count in uses.items():
        tracker.observe([ord(name)] * count)
    return tracker


def test_three_hits_promote_the_most_used_first():
    policy = PlacementPolicy(used(a=2, b=3, c=9, d=5), copy_cost=0, saving=1)
    placement = policy.place(b"abcd", resident=lambda key: key == ord("d"))
    assert placement == ([ord("d")], [*b"abc"], [*b"cb"])


@pytest.mark.parametrize(("copy_cost", "promoted"), [(299, b"cb"), (300, b"c"), (799, b"c"), (900, b"")])
def test_a_copy_must_pay_for_itself(copy_cost, promoted):
    policy = PlacementPolicy(used(a=2, b=3, c=9), copy_cost, saving=100)
    assert policy.place(b"abc", resident=lambda _: False).promote == [*promoted]


@pytest.mark.parametrize(("evicted", "pays"), [(None, True), ("a", True), ("b", True), ("d", False), ("z", True)])
def test_what_is_evicted_counts_against_the_copy(evicted, pays):
    """Nine uses less those of the other: four must remain."""
    policy = PlacementPolicy(used(a=2, b=5, c=9, d=6), copy_cost=300, saving=100)
    assert policy.pays(ord("c"), evicted and ord(evicted)) is pays


def test_a_tier_must_save_something():
    with pytest.raises(ValueError, match="saves 0"):
        PlacementPolicy(Tracker(1), 1, 0)
