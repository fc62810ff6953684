"""Replays: known hits, naive caches, the best that any choice gives; and what the cache policy must hold on traces."""

import numpy as np
import pytest

from mosaic.runtime.experts.replay import Calls, belady, lfu, lru, next_uses, ours, replay
from mosaic.runtime.experts.trace import Trace, TraceHeader


def calls_of(text: str) -> Calls:
    """A call per word, a key per letter."""
    return [[ord(letter) for letter in word] for word in text.split()]


@pytest.mark.parametrize(
    ("text", "slots", "hits"),
    [
        ("a b c a b c", 2, (0, 0, 2)),
        ("a a b c b c", 2, (3, 1, 3)),
        ("a b a c a b", 2, (2, 2, 2)),
        ("a b a a c b c b", 3, (5, 5, 5)),
        ("ab cd ab cd", 4, (4, 4, 4)),
        ("ab cd ab cd", 3, (2, 2, 2)),  # a call evicts nothing of its own
        ("ab bc ca", 2, (2, 2, 2)),
    ],
)
def test_known_hits(text, slots, hits):
    calls = calls_of(text)
    assert (lru(calls, slots), lfu(calls, slots), belady(calls, slots)) == hits


def naive(calls: Calls, slots: int, by_count: bool) -> int:
    """LFU or LRU by a search through the cache. Of equals LFU evicts the lower key, LRU what was hit."""
    uses: dict[int, int] = {}  # since it came
    last: dict[int, tuple[int, ...]] = {}
    hits = 0
    for call, keys in enumerate(calls):
        missing = [key for key in keys if key not in uses]
        hits += len(keys) - len(missing)
        for key in missing:
            if len(uses) == slots:
                victims = [key for key in uses if key not in keys]
                ranks = {key: (uses[key], last[key][0], key) if by_count else last[key] for key in victims}
                del uses[min(victims, key=ranks.__getitem__)]
            uses[key] = 0
        for position, key in enumerate(keys):
            uses[key] += 1
            last[key] = (call, key in missing, position)
    return hits


def best(calls: Calls, slots: int) -> int:
    """The most hits, by trying every eviction."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for keys in calls:
        after: dict[frozenset[int], int] = {}
        for cache, hits in states.items():
            found = hits + len(cache & set(keys))
            reached = {cache | set(keys)}
            while len(next(iter(reached))) > slots:
                reached = {state - {key} for state in reached for key in state - set(keys)}
            for state in reached:
                after[state] = max(after.get(state, 0), found)
        states = after
    return max(states.values())


def random_calls(seed: int) -> Calls:
    """Two of seven keys in each, some much more often than others."""
    random = np.random.default_rng(seed)
    weights = 0.9 * random.dirichlet(np.full(7, 0.7)) + 0.1 / 7
    return [random.choice(7, 2, replace=False, p=weights).tolist() for _ in range(40)]


@pytest.mark.parametrize("seed", range(12))
def test_against_naive_caches_and_every_eviction(seed):
    calls = random_calls(seed)
    for slots in (4, 5, 6):
        assert belady(calls, slots) == best(calls, slots)
        assert lfu(calls, slots) == naive(calls, slots, by_count=True)
        assert lru(calls, slots) == naive(calls, slots, by_count=False)


def test_next_uses():
    assert next_uses(calls_of("ab bc ca")) == [[2, 1], [3, 2], [3, 3]]


def budgets(trace: Trace) -> list[int]:
    """From the fewest slots to as many as there are experts; all numbers about the floor."""
    layers, top_k = trace.header.token_shape
    everything, whole = layers * trace.header.num_experts, layers * top_k
    rising = [round(2 * top_k * (everything / (2 * top_k)) ** (step / 10)) for step in range(11)]
    return sorted({*rising, whole - 1, whole, whole + top_k, whole + 2 * top_k - 1, whole + 2 * top_k})


def test_more_slots_never_cost_a_point(trace):
    rates = [ours(trace, slots) / trace.experts.size for slots in budgets(trace)]
    best_so_far = np.maximum.accumulate(rates)
    assert max(best_so_far - rates) <= 0.01
    assert rates[0] < rates[-1]


def test_no_cliff(trace):
    """There are hits where LRU has none; and where it first has some, the previous token's, there are about as many."""
    layers, top_k = trace.header.token_shape
    whole = layers * top_k
    calls = trace.keys().reshape(-1, top_k).tolist()
    scarce = whole - 2 * top_k
    assert lru(calls, scarce) == 0
    assert ours(trace, scarce) > 0.02 * trace.experts.size
    assert ours(trace, whole) > lru(calls, whole) - 0.03 * trace.experts.size


def test_outcomes(trace):
    slots = 2 * trace.header.token_shape[0] * trace.header.top_k
    outcomes = replay(trace, slots)
    assert list(outcomes) == ["ours", "lru", "lfu", "belady"]
    for outcome in outcomes.values():
        assert outcome.hits <= outcomes["belady"].hits
        assert outcome.lookups == trace.experts.size
        missed = outcome.lookups * (1 - outcome.hit_rate)
        assert outcome.bytes_per_token == pytest.approx(missed * trace.header.expert_nbytes / len(trace.experts))


def test_with_a_slot_for_everything_only_first_uses_miss(trace):
    everything = trace.header.token_shape[0] * trace.header.num_experts
    distinct = len(np.unique(trace.keys()))
    assert {each.hits for each in replay(trace, everything).values()} == {trace.experts.size - distinct}


def test_a_layer_without_experts_is_no_layer():
    experts = np.array([[[0, 1], [2, 3]]] * 3, np.uint16)
    trace = Trace(TraceHeader("gaps", (4, 9), 4, 2, 10), experts)
    assert trace.keys()[0].tolist() == [[16, 17], [38, 39]]
    assert [(each.hits, each.bytes_per_token) for each in replay(trace, 4).values()] == [(8, 40 / 3)] * 4
