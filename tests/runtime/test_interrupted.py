"""Whatever a scheduler has been through, Ctrl-C at any line included, it answers as a fresh one would."""

from collections.abc import Sequence

import pytest

from mosaic.format.catalog import read_catalog
from mosaic.runtime import prefixes, running, scheduler
from mosaic.runtime.prefixes import StateCache
from mosaic.runtime.request import Request
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.scheduler import Scheduler
from support.interrupts import InterruptAt
from support.remember import Rememberer

GREEDY = Sampling(temperature=0.0)
TRACED = {module.__file__ for module in (scheduler, running, prefixes)}  # states and pages: test_state.py
FIRST = [5, 6, 7, 8, 9, 10]


def new(spec) -> Scheduler:
    return Scheduler(
        Rememberer(spec), num_tokens=200, stop=frozenset(), context=4096, places=1, cache=StateCache(1 << 30)
    )


def answer(scheduler: Scheduler, prompt: Sequence[int], count: int) -> list[int]:
    boundaries = [len(prompt) - 2] if len(prompt) > 4 else []
    request = Request(prompt, GREEDY, max_tokens=count, boundaries=boundaries)
    return [chosen.token for chosen in scheduler.run(request)]


@pytest.mark.parametrize("kind", ["extends", "parts", "other"])
def test_ctrl_c_at_any_line_leaves_one_that_answers_as_a_fresh_one(tiny, kind):
    spec = read_catalog(tiny).spec
    first = answer(new(spec), FIRST, 3)
    second = {  # goes on from the answer's end, goes back to the boundary, starts anew
        "extends": [*FIRST, *first, 7, 8],
        "parts": [*FIRST[:-1], 11, 12, 9],
        "other": [50, 51, 52, 53, 54, 55, 56],
    }[kind]
    said = answer(new(spec), second, 3)
    afterwards = ([*second, *said, 1, 2], [*second, 2, 3], [*FIRST, *first, 3, 4], [*FIRST, 4, 5])
    expected = [answer(new(spec), prompt, 2) for prompt in afterwards]
    wrong: set[str] = set()
    line = 0
    while True:
        line += 1
        made = new(spec)
        answer(made, FIRST, 3)
        interrupt = InterruptAt(line, TRACED)
        try:
            with interrupt:
                answer(made, second, 3)
        except KeyboardInterrupt:
            pass
        for prompt, wanted in zip(afterwards, expected, strict=True):
            try:
                right = answer(made, prompt, 2) == wanted
            except (AssertionError, IndexError, RuntimeError):
                right = False
            if not right:
                wrong.add(interrupt.where)
        if not interrupt.where:
            break
    assert line > 100  # the prompt and three tokens: fewer would mean that nothing was traced
    assert not wrong, f"interrupted before these lines, a later answer is wrong: {sorted(wrong)}"
