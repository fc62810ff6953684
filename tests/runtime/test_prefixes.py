"""The cache of snapshots, against an oracle that looks at every entry anew."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.runtime import prefixes as prefixes_module
from mosaic.runtime.prefixes import StateCache
from support.interrupts import InterruptAt
from support.states import ATTENTION, HYBRID, Memory

SIZE = Memory(HYBRID).new_sequence().nbytes  # of one snapshot
HYBRIDS, ATTENTIONS = Memory(HYBRID), Memory(ATTENTION)


def put(cache: StateCache, tokens: list[int], memory: Memory = HYBRIDS):
    snapshot = memory.after(tokens).snapshot()
    cache.put(tokens, snapshot)
    return snapshot


class Oracle:
    """Entries in a list, the least recently used first."""

    def __init__(self, room: int, cuttable: bool) -> None:
        self.entries: list[list[int]] = []
        self.room = room
        self.cuttable = cuttable

    def put(self, tokens: list[int]) -> None:
        def needless(entry: list[int]) -> bool:
            return entry == tokens or (self.cuttable and entry == tokens[: len(entry)])

        self.entries = [entry for entry in self.entries if not needless(entry)] + [tokens]
        if not self.cuttable:
            self.entries = self.entries[max(len(self.entries) - self.room, 0) :]

    def longest(self, prompt: list[int], at_most: int) -> tuple[list[int], int] | None:
        def length(entry: list[int]) -> int:
            common = max(count for count in range(len(entry) + 1) if entry[:count] == prompt[:count])
            if self.cuttable:
                return min(common, at_most)
            return common if common == len(entry) <= at_most else 0

        best = max(reversed(self.entries), key=length, default=[])
        found = length(best)
        if not found:
            return None
        self.entries.remove(best)
        self.entries.append(best)
        return best, found


TOKENS = st.lists(st.integers(0, 1), max_size=6)
STEP = st.tuples(st.sampled_from(["put", "longest", "longest", "evict"]), TOKENS, st.integers(0, 7))


@pytest.mark.parametrize("memory", [HYBRIDS, ATTENTIONS], ids=["recurrent", "cuttable"])
@given(st.integers(0, 4), st.lists(STEP, max_size=30))
@settings(max_examples=60, deadline=None)
def test_it_does_what_the_oracle_does(memory, room, steps):
    cache, oracle = StateCache(room * SIZE + SIZE // 2), Oracle(room, memory is ATTENTIONS)
    snapshots = {}
    for operation, tokens, at_most in steps:
        if operation == "put":
            snapshots[tuple(tokens)] = put(cache, tokens, memory)
            oracle.put(tokens)
        elif operation == "evict":
            assert cache.evict() == bool(oracle.entries)
            del oracle.entries[:1]
        else:
            found, expected = cache.longest(tokens, at_most), oracle.longest(tokens, at_most)
            assert (found is None) == (expected is None)
            if found and expected:
                assert found == (snapshots[tuple(expected[0])], expected[1])
        assert [tokens for tokens, _ in cache.items()] == oracle.entries
        assert len(cache) == len(oracle.entries)
        assert cache.nbytes <= cache.budget
        assert cache.nbytes == (0 if memory is ATTENTIONS else SIZE * len(cache))


def test_large_tokens_are_told_apart():
    """Of four bytes each: those that share some of them are others."""
    cache = StateCache(10 * SIZE)
    kept = put(cache, [248_000, 1])
    assert cache.longest([248_000, 1, 5], 9) == (kept, 2)
    assert cache.longest([248_000, 257, 5], 9) is None
    assert cache.longest([248_000 % 256, 1, 5], 9) is None
    cut = put(cache := StateCache(0), [248_000, 1], ATTENTIONS)
    assert cache.longest([248_000, 257, 5], 9) == (cut, 1)


def test_the_longest_is_found_among_the_messages_of_a_chat():
    cache = StateCache(10 * SIZE)
    snapshots = [put(cache, list(range(length))) for length in (3, 7, 12)]
    assert cache.longest(list(range(20)), 19) == (snapshots[2], 12)
    assert cache.longest(list(range(12)), 11) == (snapshots[1], 7)  # one token is left to compute
    assert cache.longest([*range(7), 99], 7) == (snapshots[1], 7)
    assert cache.longest([*range(6), 99], 6) == (snapshots[0], 3)
    assert cache.longest([1, 2, 3], 2) is None


def test_one_that_exceeds_the_budget_alone_is_not_kept_and_evicts_nothing():
    cache = StateCache(SIZE)
    put(cache, [1, 2])
    assert cache.make_room(SIZE)
    assert not len(cache)
    put(cache, [1, 2])
    assert not cache.make_room(SIZE + 1)
    assert len(cache) == 1
    cache.budget = SIZE - 1
    put(cache, [3])
    assert [tokens for tokens, _ in cache.items()] == [[1, 2]]


def test_what_was_evicted_gives_its_pages_back():
    memory = Memory(HYBRID)
    cache = StateCache(2 * SIZE)
    for first in range(5):
        put(cache, [first, *range(100)], memory)
    assert memory.pool.pages_in_use == 2 * 2 * 2
    while cache.evict():
        pass
    assert memory.pool.pages_in_use == 0


def test_ctrl_c_at_any_line_leaves_a_cache_within_its_budget_that_tells_the_truth():
    line = 0
    memory = Memory(HYBRID)
    states = {(first, 7, 8): memory.after([first, 7, 8]).snapshot() for first in range(4)}
    while True:
        line += 1
        cache = StateCache(2 * SIZE)
        interrupt = InterruptAt(line, {prefixes_module.__file__})
        try:
            with interrupt:
                for tokens, snapshot in states.items():
                    cache.put(tokens, snapshot)
                    cache.longest([0, 7, 8, 9], 3)
        except KeyboardInterrupt:
            pass
        assert cache.nbytes <= 2 * SIZE
        assert all(states[tuple(tokens)] is snapshot for tokens, snapshot in cache.items()), interrupt.where
        if not interrupt.where:
            break
    assert line > 40
