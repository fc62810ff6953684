"""What the reader does first, and what it makes of a file system that is slow, refuses, fails or reads by halves.

A pread of our own (tests/support/pread.c) stands before the C library's, so that reads begin and end when a test says
so. It has to be loaded before Python is: each test is a program.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from support.preload import build_pread, needs_pread

pytestmark = needs_pread

PRELUDE = """
import ctypes, errno, fcntl, os, signal, sys, threading, time
import numpy as np
from mosaic import _native
from mosaic.format import direct

shim = ctypes.CDLL(sys.argv[1])
hold, failure, times, begun = (ctypes.c_int.in_dll(shim, name) for name in ("hold", "failure", "times", "begun"))
most = ctypes.c_long.in_dll(shim, "most")
DATA = np.fromfile(sys.argv[2], np.uint8)
PAGE, PART = 4096, 512 << 10
descriptor = direct.open_direct(sys.argv[2], os.O_RDONLY)
is_direct = lambda: bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

def order(): return list((ctypes.c_long * 1000).in_dll(shim, "offsets")[: begun.value])

def await_begun(count):
    while begun.value < count: time.sleep(0.001)

def submit(reader, page, nbytes=PAGE, speculative=False):
    out = direct.aligned(nbytes)[:nbytes]
    out.fill(0xA5)
    return reader.submit(descriptor, page * PAGE, out, speculative), out

def collect(reader, tickets):
    found = []
    while len(found) < len(tickets): found += reader.wait([ticket for ticket in tickets if ticket not in found])
    return found

def failed(call):
    try: call()
    except (OSError, ValueError, RuntimeError) as error: return error
    raise AssertionError("no error")

def held_reader(depth=1):
    reader = _native.Reader(depth)
    hold.value = 1
    return reader
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pread")
    (folder / "file").write_bytes(np.random.default_rng(1).bytes(8 << 20))
    build_pread(folder)
    return folder


@pytest.fixture
def run(shim):
    def run(program):
        command = [sys.executable, "-c", PRELUDE + program, str(shim / "pread.so"), str(shim / "file")]
        environment = os.environ | {"LD_PRELOAD": str(shim / "pread.so")}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stdout) == (0, "end\n"), found.stdout + found.stderr

    return lambda program: run(program + "\nprint('end')")


def test_needed_reads_go_first(run):
    run("""
reader = held_reader()
running, _ = submit(reader, 0)
await_begun(1)
a, b = submit(reader, 1, speculative=True)[0], submit(reader, 2, speculative=True)[0]
c, d = submit(reader, 3)[0], submit(reader, 4)[0]
assert (reader.pending, reader.done([running, a, b, c, d])) == (5, [])
hold.value = 0
assert collect(reader, [a, b, c, d, running]) == [running, c, d, a, b]
assert order() == [page * PAGE for page in (0, 3, 4, 1, 2)]
""")


def test_a_speculative_read_becomes_needed(run):
    run("""
reader = held_reader()
running, _ = submit(reader, 0)
await_begun(1)
a, b, c = (submit(reader, page, speculative=page < 3)[0] for page in (1, 2, 3))
for ticket in (b, b, c, running): reader.need(ticket)
hold.value = 0
assert collect(reader, [a, b, c, running]) == [running, c, b, a]
assert order() == [page * PAGE for page in (0, 3, 2, 1)]
""")


def test_parts_of_a_speculative_read_give_way(run):
    run("""
reader = held_reader()
large, out = submit(reader, 0, 4 * PART, speculative=True)
await_begun(1)
small, _ = submit(reader, 1000)
hold.value = 0
assert collect(reader, [large, small]) == [small, large]
assert order() == [0, 1000 * PAGE, PART, 2 * PART, 3 * PART]
assert np.array_equal(out, DATA[: 4 * PART])

hold.value, begun.value = 1, 0
large, _ = submit(reader, 0, 2 * PART, speculative=True)
await_begun(1)
small, _ = submit(reader, 1000, speculative=True)
reader.need(small)
reader.need(large)
hold.value = 0
assert collect(reader, [large, small]) == [small, large]
assert order() == [0, 1000 * PAGE, PART]
""")


def test_parts_are_read_side_by_side(run):
    run("""
reader = held_reader(4)
assert reader.idle == 4
large, out = submit(reader, 0, 3 * PART)
await_begun(3)
assert (reader.idle, reader.pending) == (1, 1)
submit(reader, 1000)
await_begun(4)
submit(reader, 1001)
assert (reader.idle, reader.pending) == (0, 3)
time.sleep(0.05)
assert sorted(order()) == [0, PART, 2 * PART, 1000 * PAGE]
assert reader.busy_seconds >= 0.05 and reader.nbytes == 0
hold.value = 0
assert reader.wait([large]) == [large] and np.array_equal(out, DATA[: 3 * PART])
""")


def test_cancel(run):
    run("""
reader = held_reader()
running, _ = submit(reader, 0, 2 * PART)
waiting, memory = submit(reader, 2)
last, _ = submit(reader, 3, speculative=True)
await_begun(1)
assert [reader.cancel(ticket) for ticket in (running, waiting, last)] == [False, True, True]
assert "no read with ticket" in str(failed(lambda: reader.wait([waiting])))
after, _ = submit(reader, 4)
hold.value = 0
assert collect(reader, [running, after]) == [running, after]
assert order() == [0, PART, 4 * PAGE]
assert (memory == 0xA5).all() and reader.nbytes == 2 * PART + PAGE
done, _ = submit(reader, 5)
while reader.pending: time.sleep(0.001)
assert reader.cancel(done) is False and reader.done([done]) == [done]
""")


def test_ctrl_c_forgets_nothing(run):
    run("""
reader = held_reader()
ticket, out = submit(reader, 0)
for _ in range(2):
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        reader.wait([ticket])
    except KeyboardInterrupt: continue
    raise AssertionError("not interrupted")
assert reader.pending == 1
threading.Timer(0.1, lambda: setattr(hold, "value", 0)).start()  # which takes a GIL
assert reader.wait([ticket]) == [ticket] and np.array_equal(out, DATA[:PAGE])
""")


@pytest.mark.parametrize("end", ["reader.close()", "del reader"])
def test_nothing_is_written_after_the_end(run, end):
    run(f"""
reader = held_reader(2)
running, out = submit(reader, 0, 4 * PART)
waiting, memory = submit(reader, 9)
await_begun(2)
threading.Timer(0.1, lambda: setattr(hold, "value", 0)).start()
{end}
assert hold.value == 0 and begun.value == 2
assert np.array_equal(out[: 2 * PART], DATA[: 2 * PART])
assert (out[2 * PART :] == 0xA5).all() and (memory == 0xA5).all()
""")


def test_who_waits_learns_of_the_end(run):
    run("""
reader, errors = held_reader(), []
ticket, _ = submit(reader, 0, 2 * PART)
await_begun(1)
waiter = threading.Thread(target=lambda: errors.append(failed(lambda: reader.wait([ticket]))))
waiter.start()
closers = [threading.Thread(target=reader.close) for _ in range(3)]
for closer in closers: closer.start()
time.sleep(0.1)
assert all(thread.is_alive() for thread in (waiter, *closers))
hold.value = 0
for thread in (waiter, *closers): thread.join()
assert "no read with ticket" in str(errors[0])
""")


def test_a_fork_has_none_of_its_threads(run):
    run("""
reader = held_reader()
ticket, out = submit(reader, 0)
await_begun(1)
child = os.fork()
if child == 0:
    for use in (lambda: submit(reader, 1), lambda: reader.wait([ticket]), lambda: reader.idle):
        assert "fork" in str(failed(use))
    reader.close()
    del reader
    hold.value = 0
    other = _native.Reader(1)
    ticket, _ = submit(other, 2)
    other.wait([ticket])
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
hold.value = 0
assert reader.wait([ticket]) == [ticket] and np.array_equal(out, DATA[:PAGE])
""")


@pytest.mark.parametrize("at_most", [1000, 4095, 4096, 5000])
def test_reads_that_are_cut_short_or_interrupted(run, at_most):
    run(f"""
reader = _native.Reader(1)
failure.value, times.value, most.value = errno.EINTR, 3, {at_most}
ticket, out = submit(reader, 0, 9 * PAGE)
assert reader.wait([ticket]) == [ticket] and np.array_equal(out, DATA[: 9 * PAGE])
assert begun.value > 5
""")


def test_a_file_system_that_refuses_direct_reads(run):
    run("""
if is_direct():
    reader = _native.Reader(1)
    failure.value, times.value = errno.EINVAL, 1
    ticket, out = submit(reader, 1, 3 * PAGE)
    assert reader.wait([ticket]) == [ticket] and np.array_equal(out, DATA[PAGE : 4 * PAGE])
    assert not is_direct()
""")


@pytest.mark.parametrize(("code", "refusals"), [("EIO", 1), ("EINVAL", 2)])
def test_errors(run, code, refusals):
    run(f"""
reader = held_reader()
failure.value, times.value = errno.{code}, {refusals}
bad, out = submit(reader, 8, 4 * PART)
good, _ = submit(reader, 1)
await_begun(1)
hold.value = 0
while reader.pending: time.sleep(0.001)
error = failed(lambda: reader.wait([good, bad]))
assert error.errno == errno.{code} and f"reading {{4 * PART}} bytes at offset {{8 * PAGE}}: " in str(error), error
assert "no read with ticket" in str(failed(lambda: reader.wait([bad])))
assert reader.wait([good]) == [good]
assert order()[{refusals}:] == [PAGE]  # the other parts were not begun
assert (out == 0xA5).all() and reader.nbytes == PAGE
""")
