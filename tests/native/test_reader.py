"""The reader against files as they are: bytes, errors, what it keeps alive. Order and faults: test_reader_order.py."""

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from mosaic import _native
from mosaic.format import direct
from mosaic.format.layout import PAGE

SIZE = (5 << 20) + 1234
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
UNTOUCHED = 0xA5


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["direct", "plain"])
def descriptor(file, request):
    descriptor = direct.open_direct(file, os.O_RDONLY) if request.param == "direct" else os.open(file, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def reader():
    reader = _native.Reader(4)
    yield reader
    reader.close()


def collect(reader, tickets):
    left, found = set(tickets), []
    while left:
        found += reader.wait(sorted(left))
        left -= set(found)
    return found


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


class Target:
    """Memory with a rim that no read may touch."""

    def __init__(self, nbytes, offset_in_page=0):
        self._all = direct.aligned(nbytes + 3 * PAGE)
        self._all.fill(UNTOUCHED)
        self._first, self._end = PAGE + offset_in_page, PAGE + offset_in_page + nbytes
        self.bytes = self._all[self._first : self._end]

    def holds(self, expected):
        rim = np.concatenate([self._all[: self._first], self._all[self._end :]])
        return np.array_equal(self.bytes, expected) and bool((rim == UNTOUCHED).all())


@pytest.mark.parametrize("memory", [0, 1, 512])
@pytest.mark.parametrize("offset", [0, 1, 512, PAGE, 3 * PAGE + 511, (1 << 20) - 1])
def test_reads_from_anywhere_to_anywhere(descriptor, reader, offset, memory):
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    sizes = [1, PAGE - 1, PAGE, 3 * PAGE + 1, 512 << 10, (512 << 10) + 1, 3 << 20]
    for nbytes in sizes:
        target = Target(nbytes, memory)
        ticket = reader.submit(descriptor, offset, target.bytes)
        assert reader.wait([ticket]) == [ticket]
        assert target.holds(DATA[offset : offset + nbytes])
    assert reader.nbytes == sum(sizes)
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) == flags  # none was refused


def test_up_to_the_end_of_the_file(descriptor, reader):
    for nbytes in (1, 1234, PAGE, 1 << 20, SIZE):
        target = Target(nbytes)
        reader.wait([reader.submit(descriptor, SIZE - nbytes, target.bytes)])
        assert target.holds(DATA[SIZE - nbytes :])


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, SIZE + 1), (SIZE - 1, 2), (SIZE, 1), (1 << 40, PAGE), (PAGE, 6 << 20)]
)
def test_the_file_ends_before(descriptor, reader, offset, nbytes):
    good = reader.submit(descriptor, 0, np.empty(10, np.uint8))
    bad = reader.submit(descriptor, offset, np.empty(nbytes, np.uint8))
    with pytest.raises(OSError, match=f"reading {nbytes} bytes at offset {offset}: the file ends before") as caught:
        collect(reader, [bad])
    assert caught.value.errno == errno.EIO
    with pytest.raises(ValueError, match=f"no read with ticket {bad}"):
        reader.wait([bad])
    assert reader.wait([good]) == [good]


def test_memory_views_and_mappings(descriptor, reader):
    memory = bytearray(100)
    reader.wait([reader.submit(descriptor, 7, memoryview(memory)[50:])])
    assert memory == bytes(50) + DATA[7:57].tobytes()


def test_a_closed_descriptor_and_a_folder(reader, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    closed = os.dup(folder)
    os.close(closed)
    with pytest.raises(IsADirectoryError, match="reading 8 bytes at offset 0"):
        reader.wait([reader.submit(folder, 0, bytearray(8))])
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        reader.wait([reader.submit(closed, 0, bytearray(8))])
    assert caught.value.errno == errno.EBADF
    os.close(folder)


def test_what_is_refused(descriptor, reader):
    memory = bytearray(8)
    for offset in (-1, (1 << 63) - 8):
        with pytest.raises(ValueError, match="offset is"):
            reader.submit(descriptor, offset, memory)
    with pytest.raises(ValueError, match="out is empty"):
        reader.submit(descriptor, 0, bytearray())
    with pytest.raises(ValueError, match="out is read-only"):
        reader.submit(descriptor, 0, b"12345678")
    with pytest.raises(ValueError, match="out has elements of format 'f'"):
        reader.submit(descriptor, 0, np.empty(8, np.float32))
    with pytest.raises(ValueError, match="at least one"):
        reader.wait([])
    for use in (reader.need, reader.cancel, lambda ticket: reader.done([ticket])):
        with pytest.raises(ValueError, match="no read with ticket 77"):
            use(77)
    for depth in (0, 1025):
        with pytest.raises(ValueError, match=f"depth is {depth}"):
            _native.Reader(depth)
    assert reader.done([]) == []
    assert reader.pending == 0


def test_a_closed_reader(descriptor):
    reader = _native.Reader(2)
    ticket = reader.submit(descriptor, 0, bytearray(8))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.submit(descriptor, 0, bytearray(8))
    with pytest.raises(ValueError, match="no read with ticket"):
        reader.wait([ticket])
    assert (reader.pending, reader.idle) == (0, 0)


def test_memory_lives_as_long_as_its_read(descriptor):
    def submit(reader):
        memory = np.empty(1 << 20, np.uint8)
        return reader.submit(descriptor, 0, memory), weakref.ref(memory)

    reader = _native.Reader(1)
    ticket, memory = submit(reader)
    assert memory() is not None
    reader.wait([ticket])
    assert memory() is None
    _, first = submit(reader)
    ticket, last = submit(reader)
    assert reader.cancel(ticket) == (last() is None)
    del reader
    assert (first(), last()) == (None, None)


def test_no_thread_outlives_its_reader(descriptor):
    before = threads()
    for number in range(50):
        reader = _native.Reader(8)
        assert threads() == before + 8
        for _ in range(number % 20):
            reader.submit(descriptor, 0, bytearray(1 << 20))
        if number % 2:
            reader.close()
        del reader
        assert threads() == before


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan wants the address space")
def test_more_threads_than_the_machine_gives():
    program = (
        "import resource; from pathlib import Path; from mosaic import _native\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * 4096 + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "try: _native.Reader(1000)\n"
        "except RuntimeError as error: print(error, len(list(Path('/proc/self/task').iterdir())))\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    words = shown.stdout.split(",")
    assert words[0].startswith("the machine gives ")
    assert words[1] == " not 1000 1\n"


def test_many_callers_at_random(descriptor):
    """Every read that is collected has its bytes, every one that was cancelled none, whoever does what meanwhile."""
    reader, right, wrong = _native.Reader(6), [], []

    def check(ticket, target, expected):
        (right if target.holds(expected) else wrong).append(ticket)

    def call(seed):
        choose, waiting = random.Random(seed), {}
        for _ in range(200):
            action = choose.random()
            if action < 0.5 or not waiting:
                nbytes, step = choose.choice([1, 300, PAGE, 70_000, 600_000]), choose.choice([1, PAGE])
                offset = choose.randrange(SIZE - nbytes) // step * step
                target = Target(nbytes, choose.choice([0, 0, 5]))
                ticket = reader.submit(descriptor, offset, target.bytes, speculative=choose.random() < 0.5)
                waiting[ticket] = target, DATA[offset : offset + nbytes]
            elif action < 0.6:
                reader.need(choose.choice(list(waiting)))
            elif action < 0.7:
                ticket = choose.choice(list(waiting))
                if reader.cancel(ticket):
                    target, expected = waiting.pop(ticket)
                    check(ticket, target, np.full_like(expected, UNTOUCHED))
            else:
                for ticket in (reader.done if action < 0.8 else reader.wait)(list(waiting)):
                    check(ticket, *waiting.pop(ticket))
        for ticket in collect(reader, waiting):
            check(ticket, *waiting.pop(ticket))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    last = reader.submit(descriptor, 0, bytearray(1))
    assert (len(right), wrong) == (last - 1, [])
    collect(reader, [last])
    assert (reader.pending, reader.idle) == (0, 6)
    reader.close()
