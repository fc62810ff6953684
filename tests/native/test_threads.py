"""The thread pool: any number of threads, changed between calls, in forked children and under concurrent callers."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from mosaic import _native

UNLIMITED = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan wants the address space")


@pytest.fixture(autouse=True)
def threads():
    before = _native.threads()
    yield
    _native.set_threads(before)


def product(seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((512, 256)).astype(np.float32)
    x, y = rng.standard_normal((1, 256)).astype(np.float32), np.empty((1, 512), np.float32)
    matrix = _native.Matrix(weight)
    return matrix, x, y, x @ weight.T


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_any_number_of_threads(count):
    _native.set_threads(count)
    assert _native.threads() == count
    matrix, x, y, expected = product()
    for _ in range(200):
        y.fill(np.nan)
        _native.linear([matrix], x, [y])
        assert np.allclose(y, expected, atol=1e-3)


@pytest.mark.parametrize("count", [0, -1])
def test_there_is_at_least_one(count):
    with pytest.raises((ValueError, TypeError)):
        _native.set_threads(count)


def test_threads_that_sleep_are_woken():
    """They spin for half a millisecond; a second later they sleep."""
    _native.set_threads(2)
    matrix, x, y, expected = product()
    for _ in range(3):
        _native.linear([matrix], x, [y])
        threading.Event().wait(0.05)
    assert np.allclose(y, expected, atol=1e-3)


def test_callers_in_many_threads():
    _native.set_threads(3)
    wrong = []

    def call(seed):
        matrix, x, y, expected = product(seed)
        for number in range(100):
            y.fill(np.nan)
            _native.linear([matrix], x, [y])
            if not np.allclose(y, expected, atol=1e-3):
                wrong.append((seed, number))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def limited(program, limit):
    """Runs a program whose address space may grow by so many bytes once it has set up; its exit code and words."""
    prelude = (
        "import resource, sys, threading, numpy as np; from mosaic import _native; from pathlib import Path\n"
        f"def limit(): used = int(Path('/proc/self/statm').read_text().split()[0]) * 4096; "
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {limit}, used + {limit}))\n"
    )
    found = subprocess.run([sys.executable, "-c", prelude + program], capture_output=True, text=True, timeout=60)
    return found.returncode, found.stdout + found.stderr


@UNLIMITED
def test_more_threads_than_the_machine_gives():
    program = (
        "limit()\n"
        "try: _native.set_threads(1024)\n"
        "except RuntimeError as error: print('refused', error)\n"
        "m = _native.Matrix(np.ones((64, 64), np.float32)); y = np.empty((1, 64), np.float32)\n"
        "_native.set_threads(1); _native.linear([m], np.ones((1, 64), np.float32), [y]); print(y[0, 0])\n"
    )
    code, words = limited(program, 64 << 20)
    assert (code, "refused" in words, "64.0" in words) == (0, True, True), words


@UNLIMITED
def test_memory_that_runs_out_within_a_task():
    """The caller gets a MemoryError, and the next call that needs less works."""
    program = (
        "_native.set_threads(2); m = _native.Matrix(np.ones((512, 512), np.float32))\n"
        "def call(tokens, y): _native.linear([m], np.ones((tokens, 512), np.float32), [y])\n"
        "small, x = np.empty((2, 512), np.float32), np.ones((60000, 512), np.float32); large = np.empty_like(x)\n"
        "call(2, small); limit()\n"
        "for _ in range(3):\n"
        "    try: _native.linear([m], x, [large]); print('enough')\n"
        "    except MemoryError: print('refused')\n"
        "    call(2, small); print(small[1, 5])\n"
    )
    code, words = limited(program, 32 << 20)
    assert (code, words.count("refused"), words.count("512.0")) == (0, 3, 3), words


def test_subnormal_numbers_whoever_computes():
    """Torch may have told the calling thread to take them for zero; the pool's threads know nothing of that."""
    torch = pytest.importorskip("torch")
    weight = np.full((4096, 64), 1e-30, np.float32)
    matrix, x, y = _native.Matrix(weight), np.full((1, 64), 1e-10, np.float32), np.empty((1, 4096), np.float32)
    _native.set_threads(2)
    try:
        torch.set_flush_denormal(True)
        for _ in range(20):
            _native.linear([matrix], x, [y])
            assert np.count_nonzero(y.view(np.uint32)) == y.size
    finally:
        torch.set_flush_denormal(False)


def test_a_forked_child_has_threads_of_its_own():
    _native.set_threads(2)
    matrix, x, y, expected = product()
    _native.linear([matrix], x, [y])
    child = os.fork()
    if child == 0:
        y.fill(np.nan)
        _native.linear([matrix], x, [y])
        os._exit(0 if np.allclose(y, expected, atol=1e-3) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
