"""A disk that is slow, reads by halves or fails: slower progress or a clear error, never another word.

The C library's pread is replaced (tests/support/preload.py), so each test is a program.
"""

import os
import subprocess
import sys

import pytest

from support.preload import build_pread, needs_pread

pytestmark = needs_pread

PROGRAM = """
import ctypes, errno, sys, threading, time
from pathlib import Path
from mosaic.format.errors import InputError
from mosaic.runtime import ram_items
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.loading import Loading
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.weights import Weights

ram_items.resident_memory = lambda: 200 << 20  # this process does not grow, as far as plans go
shim, folder = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
hold, failure, times = (ctypes.c_int.in_dll(shim, name) for name in ("hold", "failure", "times"))
most = ctypes.c_long.in_dll(shim, "most")

def engine(slots):
    places = ExpertPlaces(Weights(folder))
    whole = Loading(folder, KVFormat.BF16, context=256, state_budget=0).plan.total
    ram = whole - (len(places) - slots) * places[0, 0].span_nbytes - (1 << 18)
    made = Engine.load(folder, ops=CpuOps(), context=256, ram=ram, state_budget=0)
    made.scheduler.stop = frozenset()
    return made

def answer(engine):
    found = engine.generate("Tell me about Ruth 1.", max_tokens=12, temperature=0.0)
    assert found.stats.traffic.misses > 0
    return [chosen.token for chosen in found.tokens]

expected = answer(engine(40))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo):
    library = build_pread(tmp_path_factory.mktemp("pread"))

    def run(program):
        command = [sys.executable, "-c", f"{PROGRAM}{program}\nprint('end')", str(library), str(demo)]
        environment = os.environ | {"LD_PRELOAD": str(library)}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stdout) == (0, "end\n"), found.stdout + found.stderr

    return run


def test_reads_by_halves(run):
    run("most.value = 20_000; assert answer(engine(40)) == expected")


def test_a_slow_disk(run):
    """Reads stop for a while, again and again."""
    run("""
slow = engine(40)
going = True
def brake():
    while going:
        hold.value = 1 - hold.value
        time.sleep(0.01)
thread = threading.Thread(target=brake)
thread.start()
try:
    assert answer(slow) == expected
finally:
    going = False
    thread.join()
    hold.value = 0
""")


def test_a_disk_that_fails_and_recovers(run):
    """The error names the file; the next answer is whole again."""
    run("""
bad = engine(40)
failure.value, times.value = errno.EIO, 3
try:
    answer(bad)
except InputError as error:
    assert "a shard cannot be read" in str(error) and "layers-0" in str(error), error
else:
    raise AssertionError("no error")
times.value = 0
assert answer(bad) == expected
""")
