"""Replays a routing trace against caches of so many slots: ours, the usual ones, and the best that there can be.

All are asked the same: the top_k experts of one layer for one token are needed together, so no policy may evict one of
them for another. What is missing is always fetched. Counts lookups and hits, from an empty cache on; measures no time.
"""

import heapq
from dataclasses import dataclass

from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import Trace

Calls = list[list[int]]  # the keys of one layer for one token


@dataclass(frozen=True)
class Outcome:
    """What came of a replay."""

    tokens: int
    lookups: int
    hits: int
    expert_nbytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that found their expert."""
        return self.hits / self.lookups

    @property
    def bytes_per_token(self) -> float:
        """Bytes to be fetched for a token."""
        return (self.lookups - self.hits) * self.expert_nbytes / self.tokens


def replay(trace: Trace, slots: int) -> dict[str, Outcome]:
    """The outcome of every policy, by name. `slots`: at least 2 * top_k. The trace has at least one token."""
    tokens = len(trace.experts)
    calls = trace.keys().reshape(-1, trace.header.top_k).tolist()
    return {
        name: Outcome(tokens, trace.experts.size, hits, trace.header.expert_nbytes)
        for name, hits in (
            ("ours", ours(trace, slots)),
            ("lru", lru(calls, slots)),
            ("lfu", lfu(calls, slots)),
            ("belady", belady(calls, slots)),
        )
    }


def ours(trace: Trace, slots: int) -> int:
    """Hits of the cache policy of the runtime, asked as the runtime asks."""
    header = trace.header
    policy = SlotPolicy(slots, header.layers, header.num_experts, header.top_k)
    misses = 0
    for token in trace.keys().tolist():
        misses += sum(len(fetch(policy, keys)) for keys in token)
        policy.tick()
    return trace.experts.size - misses


def fetch(policy: SlotPolicy, keys: list[int]) -> list[int]:
    """Ask for the experts of one layer for one token, all of which are then in slots; those that were not."""
    pinned: list[int] = []
    missing: list[int] = []
    for key in keys:
        policy.use(key)
        slot = policy.find(key)
        if slot is None:
            missing.append(key)
        else:
            policy.pin(slot)
            pinned.append(slot)
    for key in missing:
        claim = policy.claim(key)
        assert claim is not None
        pinned.append(claim.slot)
    for slot in pinned:
        policy.unpin(slot)
    return missing


def lru(calls: Calls, slots: int) -> int:
    """Hits if the least recently used expert goes."""
    cache: dict[int, None] = {}  # the least recently used first
    hits = 0
    for keys in calls:
        present = [key for key in keys if key in cache]
        hits += len(present)
        for key in present:
            del cache[key]
        cache |= dict.fromkeys(present)
        for key in keys:
            if key not in cache:
                if len(cache) == slots:
                    del cache[next(iter(cache))]
                cache[key] = None
    return hits


def lfu(calls: Calls, slots: int) -> int:
    """Hits if the expert goes that was used least often since it was fetched; of equals the least recently used."""
    cache: dict[int, tuple[int, int]] = {}  # uses, last call
    heap: list[tuple[tuple[int, int], int]] = []  # one entry per key in the cache, its value as it is or was
    hits = 0
    for call, keys in enumerate(calls):
        missing = []
        for key in keys:
            if key in cache:
                cache[key] = (cache[key][0] + 1, call)
            else:
                missing.append(key)
        hits += len(keys) - len(missing)
        needed = []
        for _ in range(len(cache) + len(missing) - slots):
            while True:
                value, key = heapq.heappop(heap)
                if value != cache[key]:
                    heapq.heappush(heap, (cache[key], key))
                elif value[1] == call:
                    needed.append((value, key))
                else:
                    break
            del cache[key]
        for entry in needed + [((1, call), key) for key in missing]:
            heapq.heappush(heap, entry)
        cache |= dict.fromkeys(missing, (1, call))
    return hits


def belady(calls: Calls, slots: int) -> int:
    """Hits if the expert goes whose next use is farthest: no policy that knows the future has more."""
    cache: dict[int, int] = {}  # next use
    heap: list[tuple[int, int]] = []  # negated next use and key, also of those that were used or evicted since
    hits = 0
    for keys, following in zip(calls, next_uses(calls), strict=True):
        found = sum(key in cache for key in keys)
        hits += found
        for _ in range(len(cache) + len(keys) - found - slots):
            while True:
                farthest, key = heapq.heappop(heap)
                if cache.get(key) == -farthest:
                    break
            del cache[key]
        for key, use in zip(keys, following, strict=True):
            cache[key] = use
            heapq.heappush(heap, (-use, key))
    return hits


def next_uses(calls: Calls) -> list[list[int]]:
    """For every lookup the number of the next call with the same key; of the last one, the number of calls."""
    after = len(calls)
    upcoming: dict[int, int] = {}
    result = []
    for call in reversed(range(len(calls))):
        result.append([upcoming.get(key, after) for key in calls[call]])
        upcoming |= dict.fromkeys(calls[call], call)
    return result[::-1]
