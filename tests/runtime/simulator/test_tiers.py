"""Two tiers by hand: three uses promote, a copy takes its time and its turn, RAM keeps what is read.

Layers of 8 experts, two used at a time; a copy takes 2 seconds.
"""

import functools
from collections import Counter

from mosaic.runtime.experts.placement import WINDOW, PlacementPolicy
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import TraceHeader
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.simulator import tiers as module
from mosaic.runtime.simulator.costs import Call
from mosaic.runtime.simulator.tiers import RING, Tiers, Vram

HEADER = TraceHeader("by hand", (0,), 8, 2, 1)
MANY = TraceHeader("by hand", (0,), 32, 16, 1)


def tiers(vram=4, ram=8, header=HEADER, copy=2.0, saving=2.0) -> Tiers:
    return Tiers(header, vram, ram, copy, saving)


def use(tiers: Tiers, keys: list[int], now: float = 0.0) -> Call:
    call = tiers.call(keys, now)
    tiers.tick()
    return call


def test_three_uses_promote_and_the_copy_lands_later():
    both = tiers()
    assert [use(both, [0, 1]) for _ in range(2)] == [Call(0, 2, 0, 0)] * 2
    assert use(both, [0, 2]) == Call(0, 2, 0, 1)
    assert use(both, [0, 2], now=1.9) == Call(0, 2, 0, 0)  # on its way, and not promoted again
    assert use(both, [0, 2], now=2.0) == Call(1, 1, 0, 1)
    assert use(both, [0, 2], now=3.9) == Call(1, 1, 0, 0)
    assert use(both, [0, 2], now=4.0) == Call(2, 0, 0, 0)


def test_copies_take_turns():
    both = tiers()
    for _ in range(2):
        use(both, [0, 1])
    assert use(both, [0, 1]).promoted == 2
    assert [use(both, [0, 1], now).hot for now in (1.9, 2.0, 3.9, 4.0)] == [0, 1, 1, 2]


def test_no_more_copies_than_the_ring_holds():
    both = tiers(32, 32, MANY)
    keys = list(range(16))
    for _ in range(2):
        use(both, keys)
    assert use(both, keys).promoted == RING
    assert use(both, keys, now=1.9).promoted == 0
    assert use(both, keys, now=2.0) == Call(1, 15, 0, 1)


def test_a_copy_that_does_not_pay_is_not_made():
    dear = tiers(copy=10.0)  # what 5 uses save
    assert [use(dear, [0, 1]).promoted for _ in range(8)] == [0, 0, 0, 0, 0, 2, 0, 0]


def test_uses_are_forgotten_after_the_window():
    both = tiers()
    for _ in range(2):
        use(both, [0, 1])
    for _ in range(WINDOW - 2):
        use(both, [2, 3])
    assert use(both, [0, 4]).promoted == 0
    assert use(both, [0, 4]).promoted == 0
    assert use(both, [0, 4]).promoted == 2


def test_the_policy_of_the_runtime_decides(monkeypatch):
    monkeypatch.setattr(module, "PlacementPolicy", functools.partial(PlacementPolicy, min_hits=5))
    both = tiers()
    assert [use(both, [0, 1]).promoted for _ in range(6)] == [0, 0, 0, 0, 2, 0]


def test_what_is_as_hot_does_not_take_the_slot_of_another():
    """Four slots; six experts that are used in turn."""
    both = tiers()
    promoted = [
        use(both, pair, now=10.0 * number).promoted for number, pair in enumerate([[0, 1], [2, 3], [4, 5]] * 20)
    ]
    assert sum(promoted) == 4
    promoted = [use(both, [4, 5], now=1000.0 + 10 * number).promoted for number in range(40)]
    assert sum(promoted) == 2  # now they are hotter


def test_ram_reads_what_it_lacks_and_keeps_it():
    both = tiers(ram=4)
    found = [use(both, pair).missing for pair in ([0, 1], [2, 3], [0, 1], [4, 0], [2, 3])]
    assert found == [2, 2, 0, 1, 1]
    assert [use(tiers(ram=8), pair).missing for pair in ([0, 1], [2, 3])] == [0, 0]  # all are there from the start


def test_what_vram_has_is_not_read():
    both = tiers(ram=4)
    for number in range(4):
        use(both, [0, 1], now=10.0 * number)
    for number in range(4, 10):
        call = use(both, [0, 2 + number % 6], now=10.0 * number)
        assert call.hot == 1
        assert call.missing <= 1


def test_one_tier():
    ram = tiers(vram=0, ram=4, copy=0.0, saving=0.0)
    assert [use(ram, [0, 1]) for _ in range(4)] == [Call(0, 2, 2, 0)] + [Call(0, 2, 0, 0)] * 3


def test_ram_counts_what_vram_does_not_have(monkeypatch):
    """As CachedExperts does: what is computed in VRAM may leave RAM."""
    made = []

    class Counting(SlotPolicy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.used = Counter()
            made.append(self)

        def use(self, key):
            super().use(key)
            self.used[key] += 1

    monkeypatch.setattr(module, "SlotPolicy", Counting)
    both = tiers(ram=4)
    calls = [use(both, [0, 1 + number % 4], now=10.0 * number) for number in range(9)]
    counted = {policy.used.total(): policy.used for policy in made}
    assert counted[18] == {0: 9, 1: 3, 2: 2, 3: 2, 4: 2}  # VRAM: wherever they are computed
    hot = sum(call.hot for call in calls)
    assert hot > 3
    assert counted[18 - hot][0] < 9


def test_the_least_used_goes_but_not_while_it_computes():
    tracker = Tracker(WINDOW)
    slots = SlotPolicy(4, (0,), 8, 2)
    vram = Vram(slots, PlacementPolicy(tracker, 0, 1), copy=1.0)

    def call(keys: list[int], uses: int, now: float) -> int:
        tracker.observe(keys * uses)
        return vram.promote(vram.place(keys, now), now)

    assert [call(pair, 3, now=0.0) for pair in ([0, 1], [2, 3])] == [2, 2]
    for pair in ([1, 2], [2, 3], [3, 1], [2, 3]):  # 0 is the least used, then 1
        assert call(pair, 1, now=10.0) == 0
    assert call([0, 4], 9, now=10.0) == 1
    assert [slots.find(key) is not None for key in range(5)] == [True, False, True, True, True]
