"""Reading and writing in whole pages, wherever bytes lie, whatever the file system makes of O_DIRECT."""

import errno
import fcntl
import os

import numpy as np
import pytest

from mosaic.format import direct

PAGE = 4096
SIZE = 5 * PAGE + 123
DATA = np.random.default_rng(0).bytes(SIZE)
PLACES = [(0, SIZE), (0, 1), (1, 1), (4095, 2), (4096, 4096), (5, 3 * PAGE), (SIZE - 1, 1), (5 * PAGE, 123), (17, 0)]


@pytest.fixture
def descriptor(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    descriptor = direct.open_direct(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(("offset", "nbytes"), PLACES)
def test_reads_from_anywhere(descriptor, offset, nbytes):
    assert direct.read(descriptor, offset, nbytes).tobytes() == DATA[offset : offset + nbytes]


@pytest.mark.parametrize("offset", [0, 1, 5 * PAGE, SIZE - 1, SIZE, SIZE + 1, 10 * PAGE])
def test_the_file_ends_before(descriptor, offset):
    assert direct.read(descriptor, offset, 3 * SIZE).tobytes() == DATA[offset:]


def test_a_file_that_shrinks_while_it_is_read(descriptor, tmp_path, monkeypatch):
    status = os.fstat(descriptor)
    monkeypatch.setattr(os, "fstat", lambda number: status)
    os.truncate(tmp_path / "file", PAGE + 10)
    assert direct.read(descriptor, 3, SIZE).tobytes() == DATA[3 : PAGE + 10]
    assert direct.read(descriptor, 4 * PAGE, 10).tobytes() == b""


def test_reads_that_are_cut_short(descriptor, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, buffers, place: preadv(number, [buffers[0][:PAGE]], place))
    assert direct.read(descriptor, 7, SIZE - 8).tobytes() == DATA[7 : SIZE - 1]


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 1 << 20])
def test_aligned_memory(nbytes):
    memory = direct.aligned(nbytes)
    assert memory.ctypes.data % PAGE == 0
    assert len(memory) % PAGE == 0
    assert nbytes <= len(memory) < nbytes + PAGE


@pytest.mark.parametrize("nbytes", [2 << 20, (2 << 20) + 1, 9 << 20])
def test_memory_worth_huge_pages_begins_on_one(nbytes):
    assert direct.aligned(nbytes).ctypes.data % direct.HUGE_PAGE == 0


def test_memory_is_used_again():
    memory = direct.Memory()
    first = memory.take(10)
    assert memory.take(PAGE).ctypes.data == first.ctypes.data
    larger = memory.take(3 << 20)
    assert len(larger) == 3 << 20
    assert memory.take(1).ctypes.data == larger.ctypes.data


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (4095, 4096), (4095, 4097), (4096, 8192), (5, 12289)])
def test_pages_that_bytes_span(first, end):
    pages = {byte // PAGE for byte in range(first, end)}
    assert direct.spanned(first, end) == len(pages) * PAGE


def test_writes(tmp_path, monkeypatch):
    buffer = direct.aligned(3 * PAGE)
    buffer[:] = np.frombuffer(DATA, np.uint8, 3 * PAGE)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda number, data, place: pwrite(number, data[:PAGE], place))
    descriptor = direct.open_direct(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    direct.write(descriptor, buffer, PAGE)
    os.close(descriptor)
    assert (tmp_path / "out").read_bytes() == bytes(PAGE) + DATA[: 3 * PAGE]


def test_a_write_that_stops_within_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda number, data, place: 100)
    with pytest.raises(OSError, match="within one"):
        direct.write(0, direct.aligned(PAGE), 0)


class TestWithoutDirect:
    """File systems that have no O_DIRECT, or refuse it at the first transfer."""

    def test_at_open(self, tmp_path, monkeypatch):
        plain = os.open

        def refuse(file, flags, mode=0o777):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return plain(file, flags, mode)

        (tmp_path / "file").write_bytes(DATA)
        monkeypatch.setattr(os, "open", refuse)
        descriptor = direct.open_direct(tmp_path / "file", os.O_RDONLY)
        assert not is_direct(descriptor)
        assert direct.read(descriptor, 5, SIZE).tobytes() == DATA[5:]
        os.close(descriptor)

    @pytest.mark.parametrize("call", ["preadv", "pwrite"])
    def test_at_the_first_transfer(self, tmp_path, monkeypatch, call):
        (tmp_path / "file").write_bytes(DATA)
        descriptor = direct.open_direct(tmp_path / "file", os.O_RDWR)
        if not is_direct(descriptor):
            pytest.skip("this file system has no O_DIRECT")
        transfer = getattr(os, call)

        def refuse(number, *arguments):
            if is_direct(number):
                raise OSError(errno.EINVAL, "not so")
            return transfer(number, *arguments)

        monkeypatch.setattr(os, call, refuse)
        if call == "preadv":
            assert direct.read(descriptor, 5, SIZE).tobytes() == DATA[5:]
        else:
            direct.write(descriptor, direct.aligned(PAGE), 0)
        assert not is_direct(descriptor)
        os.close(descriptor)

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    def test_other_errors_stay(self, descriptor, monkeypatch, code):
        def fail(*arguments):
            raise OSError(code, "no")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="no") as caught:
            direct.read(descriptor, 0, 10)
        assert caught.value.errno == code
