"""How the settings with which a model is fastest here are found: one after the other, from each to a better neighbour.

Decides what to try, what to believe and when to stop. What a setting costs is asked of whoever measures it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SECONDS = 60.0  # for everything
PAIRS = 3  # how often two values are measured side by side
LEAST_GAIN = 0.02  # share of a cost that is worth a change, however little the measurements differ
HOPELESS = 1.25  # times as dear: once is enough

MIN_HITS = (1, 2, 3, 4, 6, 8)
SHORTEST_STREAMED = 64  # tokens of a prompt

Settings = Mapping[str, int]


@dataclass(frozen=True)
class Knob:
    """A setting: `values`, ascending, the present one among them.

    `cost(settings, smaller)`: seconds per token with all settings so, the higher the worse; `smaller` of the two values
    that are compared, since what a threshold changes lies between them. `expected`: seconds that a first trial takes.
    """

    name: str
    values: Sequence[int]
    cost: Callable[[Settings, int], float]
    expected: float = 0.0


@dataclass
class Found:
    """What became of a setting. `cost`: seconds per token with `before`; `gain`: times as many tokens with `after`.

    `cost` is None if no two values were compared; `finished` says whether nothing was left to try. `doubted`: a
    neighbour of `after` that looked faster, but by too little to be believed.
    """

    before: int
    after: int
    cost: float | None = None
    gain: float = 1.0
    finished: bool = False
    doubted: int | None = None


class Climb:
    """Of several knobs: until a round through all of them changes nothing, or time is over.

    `told` hears of every trial: the knob, its value, the cost.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        settings: Settings,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[Knob, int, float], object] = lambda knob, value, cost: None,
    ) -> None:
        self.settings = dict(settings)
        self.found = {knob.name: Found(settings[knob.name], settings[knob.name]) for knob in knobs}
        self._knobs = knobs
        self._deadline, self._clock, self._told = deadline, clock, told
        self._longest: dict[str, float] = {}  # seconds that a trial took
        self._compared: set[tuple[object, ...]] = set()

    def run(self) -> None:
        """Find `settings`, and all that is `found` of them."""
        changed = True
        while changed:
            changed = False
            for knob in self._knobs:
                changed |= self._along(knob)

    def _along(self, knob: Knob) -> bool:
        """Up to a value with no better neighbour; whether that is another one than before."""
        found, before = self.found[knob.name], self.settings[knob.name]
        found.finished = False
        for step in (-1, 1):
            while (candidate := self._neighbour(knob, step)) is not None:
                gain = self._gain(knob, candidate)
                if gain is None:
                    return self.settings[knob.name] != before
                if gain <= 1:
                    break
                found.after = self.settings[knob.name] = candidate
                found.gain *= gain
            if self.settings[knob.name] != before:
                break  # behind it lies where it came from
        found.finished = True
        return self.settings[knob.name] != before

    def _neighbour(self, knob: Knob, step: int) -> int | None:
        """The next value in a direction; None at the end, or if the two were compared before."""
        place = knob.values.index(self.settings[knob.name]) + step
        if not 0 <= place < len(knob.values) or self._comparison(knob, knob.values[place]) in self._compared:
            return None
        return knob.values[place]

    def _comparison(self, knob: Knob, candidate: int) -> tuple[object, ...]:
        """A value and the present one, all else being as it is."""
        others = ((name, value) for name, value in sorted(self.settings.items()) if name != knob.name)
        return knob.name, frozenset((self.settings[knob.name], candidate)), *others

    def _gain(self, knob: Knob, candidate: int) -> float | None:
        """How many times as fast it is, 1 if one of the two differs as much from itself; None if there is no time."""
        present, found = self.settings[knob.name], self.found[knob.name]
        costs: dict[int, list[float]] = {present: [], candidate: []}
        hopeless = False
        for pair in range(PAIRS):
            for value in list(costs)[:: -1 if pair % 2 else 1]:
                if self._clock() + self._longest.get(knob.name, knob.expected) > self._deadline:
                    return None
                costs[value].append(self._trial(knob, value, min(costs)))
            hopeless = costs[candidate][0] > HOPELESS * costs[present][0]
            if hopeless:
                break
        self._compared.add(self._comparison(knob, candidate))
        before, after = (median(costs[value]) for value in (present, candidate))
        found.cost = before if found.cost is None else found.cost
        if not hopeless and after < before * (1 - max(LEAST_GAIN, *map(_spread, costs.values()))):
            found.doubted = None
            return before / after
        if after < before:
            found.doubted = candidate
        elif found.doubted == candidate:
            found.doubted = None
        return 1.0

    def _trial(self, knob: Knob, value: int, smaller: int) -> float:
        start = self._clock()
        cost = knob.cost({**self.settings, knob.name: value}, smaller)
        self._longest[knob.name] = max(self._clock() - start, self._longest.get(knob.name, 0.0))
        self._told(knob, value, cost)
        return cost


def _spread(costs: Sequence[float]) -> float:
    """By how much they differ from each other, as a share of their median."""
    return (max(costs) - min(costs)) / median(costs)


def thread_values(cores: int) -> list[int]:
    """Quarters of the cores: with two threads to a core, half of them may do."""
    return sorted({max(cores * quarter // 4, 1) for quarter in (1, 2, 3, 4)})


def stream_values(longest: int) -> list[int]:
    """Tokens from which a prompt's experts are streamed; the last is more than any piece has, so none are."""
    values = [SHORTEST_STREAMED]
    while values[-1] <= longest:
        values.append(2 * values[-1])
    return values
