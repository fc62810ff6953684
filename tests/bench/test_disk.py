"""That the disk's ceiling is a figure, of files that have room for a piece. How large it is is not tested."""

import errno
import os

import pytest

from bench.disk import read_bandwidth
from mosaic.format.errors import InputError

PAGE = 4096


@pytest.mark.parametrize("depth", [1, 5])
def test_a_file_of_one_piece_and_more(tmp_path, depth, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(4 * PAGE + 1))
    places, preadv = set(), os.preadv

    def note(descriptor, buffers, offset):
        places.add(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    assert read_bandwidth(tmp_path / "file", depth, 0.05, 3 * PAGE - 1) > 0
    assert places == {0, PAGE}
    assert read_bandwidth(tmp_path / "file", depth, 0.01, 4 * PAGE) > 0


def test_a_file_that_is_too_small(tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    with pytest.raises(InputError, match="smaller than a piece"):
        read_bandwidth(tmp_path / "file", 1, 0.01, PAGE + 1)


def test_a_file_that_is_not_there_or_not_direct(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_bandwidth(tmp_path / "file", 1, 0.01)

    def refuse(*arguments):
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    (tmp_path / "file").write_bytes(bytes(PAGE))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match="past the page cache"):
        read_bandwidth(tmp_path / "file", 1, 0.01, PAGE)
