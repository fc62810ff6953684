"""The climb to the fastest settings: where it goes, what it believes, and that it ends in time."""

import itertools
import random

import pytest

from mosaic.runtime.tuning import PAIRS, Climb, Knob, stream_values, thread_values

FOREVER = 1e9


class Machine:
    """`cost` of settings, with a noise of so large a share; a trial takes `seconds` of a clock that nobody looks at."""

    def __init__(self, cost, noise=0.0, seconds=1.0):
        self._cost, self._seconds = cost, seconds
        self._random, self._noise = random.Random(0), noise
        self.now = 0.0
        self.trials = []

    def __call__(self, settings, smaller):
        self.now += self._seconds(settings) if callable(self._seconds) else self._seconds
        self.trials.append((dict(settings), smaller))
        return self._cost(settings) * (1 + self._noise * self._random.uniform(-1, 1))

    def climb(self, deadline=FOREVER, expected=0.0, told=lambda *_: None, **knobs):
        """Of each knob its values and where it begins."""
        made = [Knob(name, values, self, expected) for name, (values, _) in knobs.items()]
        begin = {name: start for name, (_, start) in knobs.items()}
        climb = Climb(made, begin, deadline, clock=lambda: self.now, told=told)
        climb.run()
        return climb

    def tried(self, name):
        return [settings[name] for settings, _ in self.trials]


@pytest.mark.parametrize("best", range(1, 9))
@pytest.mark.parametrize("start", [1, 4, 8])
def test_it_goes_to_the_best_value_and_no_further(best, start):
    machine = Machine(lambda settings: 1 + 0.1 * abs(settings["threads"] - best))
    climb = machine.climb(threads=(range(1, 9), start))
    found = climb.found["threads"]
    assert climb.settings == {"threads": best}
    assert (found.before, found.after, found.finished) == (start, best, True)
    assert found.cost == pytest.approx(1 + 0.1 * abs(start - best))
    assert found.gain == pytest.approx(found.cost)
    low, high = min(start, best) - 1, max(start, best) + 1
    assert set(machine.tried("threads")) <= set(range(low, high + 1))


def test_values_are_compared_side_by_side_in_changing_order():
    machine = Machine(lambda settings: {2: 1.0, 4: 1.0}[settings["x"]])
    machine.climb(x=((2, 4), 4))
    assert machine.tried("x") == [4, 2, 2, 4, 4, 2]
    assert {smaller for _, smaller in machine.trials} == {2}


def test_what_is_hopeless_is_tried_once():
    machine = Machine(lambda settings: {2: 1.3, 4: 1.0}[settings["x"]])
    machine.climb(x=((2, 4), 4))
    assert machine.tried("x") == [4, 2]


def test_what_cannot_be_is_not_chosen():
    machine = Machine(lambda settings: {2: float("inf"), 4: 1.0}[settings["x"]])
    assert machine.climb(x=((2, 4), 4)).settings == {"x": 4}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_noise_is_no_gain(noise):
    """However strong it is, of two values that are equal one is seldom taken for better: once in 25 times."""
    moves = 0
    for seed in range(200):
        machine = Machine(lambda settings: 1.0, noise)
        machine._random.seed(seed)
        moves += machine.climb(x=((1, 2, 3), 2)).settings["x"] != 2
    assert moves <= 24  # of 400 comparisons
    assert moves == 0 or noise


def test_a_gain_above_the_noise_is_found():
    found = 0
    for seed in range(100):
        machine = Machine(lambda settings: 1.0 if settings["x"] == 1 else 1.3, noise=0.05)
        machine._random.seed(seed)
        found += machine.climb(x=((1, 2), 2)).settings["x"] == 1
    assert found == 100


def test_a_gain_below_the_least_is_none():
    machine = Machine(lambda settings: 1 - 0.01 * settings["x"])
    assert machine.climb(x=((1, 2, 3), 1)).settings == {"x": 1}


@pytest.mark.parametrize(("faster", "doubted"), [(0.01, 2), (0.0, None), (-0.01, None), (-0.5, None), (0.1, None)])
def test_what_looked_faster_but_was_not_believed_is_told(faster, doubted):
    machine = Machine(lambda settings: 1 - faster * (settings["x"] == 2))
    assert machine.climb(x=((1, 2), 1)).found["x"].doubted == doubted


def test_a_doubt_is_forgotten_when_the_value_moves_away_from_it():
    machine = Machine(lambda settings: {1: 0.99, 2: 1.0, 3: 0.5}[settings["x"]])
    found = machine.climb(x=((1, 2, 3), 2)).found["x"]
    assert (found.after, found.doubted) == (3, None)


def test_a_doubt_is_forgotten_when_another_setting_ends_it():
    """x = 2 looks faster until y is 2."""
    machine = Machine(
        lambda settings: 1 - 0.01 * (settings["x"] == 2 and settings["y"] == 1) - 0.5 * (settings["y"] == 2)
    )
    climb = machine.climb(x=((1, 2), 1), y=((1, 2), 1))
    assert climb.settings == {"x": 1, "y": 2}
    assert climb.found["x"].doubted is None


def test_slow_drift_is_no_gain():
    """A machine that becomes slower as it gets warm: pairs begin with one value and the other in turn."""
    machine = Machine(lambda settings: 1.0 + 0.03 * len(machine.trials))
    assert machine.climb(x=((1, 2, 3), 2)).settings == {"x": 2}


def test_a_setting_is_looked_at_again_when_another_has_changed():
    """The best y depends on x: 1 at first, 3 once x is 2. What was compared before is not compared again."""

    def cost(settings):
        return (2.0 if settings["x"] == 1 else 1.0) + 0.1 * abs(settings["y"] - (3 if settings["x"] == 2 else 1))

    machine = Machine(cost)
    climb = machine.climb(y=((1, 2, 3), 2), x=((1, 2), 1))
    assert climb.settings == {"x": 2, "y": 3}
    assert climb.found["y"].before == 2
    assert climb.found["y"].gain == pytest.approx(2.1 / 2.0 * 1.1 / 1.0, rel=0.1)
    seen = [tuple(sorted(settings.items())) for settings, _ in machine.trials]
    pairs = {frozenset(pair) for pair in itertools.pairwise(seen) if len(set(pair)) == 2}
    assert len(machine.trials) <= 2 * PAIRS * len(pairs)


@pytest.mark.parametrize("seconds", [0.5, 3.0, 7.0, 25.0])
@pytest.mark.parametrize("deadline", [0.0, 2.0, 20.0, 60.0])
def test_it_ends_in_time_and_says_what_is_left(seconds, deadline):
    machine = Machine(lambda settings: 1 + 0.1 * settings["x"], seconds=seconds)
    climb = machine.climb(deadline, expected=seconds, x=(range(20), 19))
    assert machine.now <= deadline
    found = climb.found["x"]
    comparisons = min(int(machine.now / seconds) // (2 * PAIRS), 19)
    assert climb.settings["x"] == 19 - comparisons  # a comparison that was not ended counts for nothing
    assert (found.cost is None) == (comparisons == 0)
    assert found.finished == (comparisons == 19)
    assert found.finished or deadline - machine.now < seconds


def test_a_trial_that_takes_longer_than_expected_is_expected_from_then_on():
    machine = Machine(lambda settings: 1.0, seconds=10.0)
    machine.climb(25.0, expected=1.0, x=((1, 2), 2))
    assert len(machine.trials) == 2


def test_what_is_quick_still_gets_its_turn_when_something_slow_does_not():
    machine = Machine(lambda settings: 1 + 0.1 * settings["quick"])
    slow = Knob("slow", (1, 2), machine, expected=100.0)
    quick = Knob("quick", (1, 2), machine, expected=1.0)
    climb = Climb([slow, quick], {"slow": 1, "quick": 2}, 50.0, clock=lambda: machine.now)
    climb.run()
    assert climb.settings == {"slow": 1, "quick": 1}
    assert (climb.found["slow"].cost, climb.found["slow"].finished) == (None, False)
    assert climb.found["quick"].finished


def test_every_trial_is_told():
    told = []
    machine = Machine(lambda settings: float(settings["x"]))
    machine.climb(x=((1, 2), 2), told=lambda knob, value, cost: told.append((knob.name, value, cost)))
    assert told == [("x", value, float(value)) for value in machine.tried("x")]


@pytest.mark.parametrize(("cores", "values"), [(1, [1]), (2, [1, 2]), (6, [1, 3, 4, 6]), (16, [4, 8, 12, 16])])
def test_threads_are_quarters_of_the_cores(cores, values):
    assert thread_values(cores) == values


def test_the_last_threshold_is_for_no_prompt():
    assert stream_values(512) == [64, 128, 256, 512, 1024]
    assert stream_values(600) == [64, 128, 256, 512, 1024]
    assert stream_values(64) == [64, 128]
