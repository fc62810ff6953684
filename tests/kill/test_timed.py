"""Whole programs, killed by the clock: the long conversion that support.long makes, at moments all over its work."""

import random
import shutil
import signal
import time

import pytest

from support.killing import CATALOG, Converter, claims_nothing_false, is_refused, left_in, same_tree
from support.long import Long

POINTS = 10  # for each number of workers
WORKERS = (1, 2, 3)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    made = Long(folder, max(WORKERS))
    print(f"seconds before and of the work, by workers: {made.seconds}")
    assert all(work > 0.2 for _, work in made.seconds.values()), f"too short to be interrupted: {made.seconds}"
    yield made
    shutil.rmtree(folder)


def interrupted(long, out, workers, share, number=signal.SIGKILL):
    """A converter stopped after a share of its work; earlier, if that came too late."""
    for _ in range(10):
        converter = Converter(long.source, out, workers=workers)
        converter.reach_work()
        time.sleep(share * long.seconds[workers][1])
        if converter.stop(number):
            return converter
        same_tree_or_nearly(out, long)
        shutil.rmtree(out)
        share *= 0.8
    raise AssertionError("cannot be interrupted")


def same_tree_or_nearly(out, long):
    """A signal that came too late: complete, if perhaps not tidied up."""
    assert (out / CATALOG).exists()
    claims_nothing_false(out, long.expected)


def finish(long, out, workers):
    left = left_in(out)
    converter = Converter(long.source, out, workers=workers)
    assert converter.end() == 0, converter.text
    same_tree(out, long.expected)
    left.is_kept(out)


@pytest.mark.parametrize("point", range(POINTS))
@pytest.mark.parametrize("workers", WORKERS)
def test_killed(long, out, workers, point):
    """Once, in any case; then, at some of the points, up to three times more on the way."""
    chance = random.Random(100 * workers + point)
    interrupted(long, out, workers, (point + 0.5) / POINTS).left()
    if point % 3 == 0:
        is_refused(out)
    for _ in range(chance.randint(1, 3) if point % 2 else 0):
        converter = Converter(long.source, out, workers=workers)
        time.sleep(chance.uniform(0, sum(long.seconds[workers])))
        converter.stop()
        converter.left()
    finish(long, out, workers)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c(long, out, workers, share):
    converter = interrupted(long, out, workers, share, signal.SIGINT)
    assert converter.process.returncode == 130
    assert "Traceback" not in converter.text
    assert "same command" in converter.text
    converter.left(begun=0)
    finish(long, out, workers)


def test_ctrl_c_of_the_impatient(long, out):
    """Once more and once more before the first was heeded: whatever comes of it, nothing is lost."""
    converter = Converter(long.source, out, workers=2)
    converter.reach_work()
    time.sleep(long.seconds[2][1] / 3)
    for _ in range(3):
        converter.process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    assert converter.end() in (130, -signal.SIGINT)
    assert "Traceback" not in converter.text, converter.text
    converter.left()
    finish(long, out, 2)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_sigterm(long, out, share):
    interrupted(long, out, 2, share, signal.SIGTERM).left()
    finish(long, out, 2)


@pytest.mark.parametrize("later", [0, 0.001, 0.01, 0.02, 0.2, 0.4])
def test_two_at_once(long, out, later):
    """Started at the same moment, or the second in the course of the first: one writes, the other says why not."""
    first = Converter(long.source, out, workers=2)
    time.sleep(later * long.seconds[2][1])
    second = Converter(long.source, out, workers=1)
    codes = first.end(), second.end()
    assert sorted(codes) == [0, 2], (first.text, second.text)
    refused = first if codes[0] else second
    assert "error: another mosaic-convert" in refused.text, refused.text
    assert "Traceback" not in refused.text, refused.text
    same_tree(out, long.expected)
