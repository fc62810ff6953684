"""What was typed is kept: for its owner only, whole lines, not without end, and never at the chat's cost."""

import json
import os
import stat

import pytest

from mosaic.runtime.terminal.history import MOST, add_to_history, history_file, read_history


def test_entries_come_back_and_are_private(tmp_path):
    file = tmp_path / "state" / "history"
    entries = ["one", "two\nlines", "\U0001f600 \u4e2d", "stray \udcff byte"]
    before = os.umask(0)
    try:
        for entry in entries:
            add_to_history(file, entry)
    finally:
        os.umask(before)
    assert read_history(file) == entries
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_open_history_is_closed(tmp_path):
    file = tmp_path / "history"
    file.write_text("")
    file.chmod(0o644)
    add_to_history(file, "x")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_lines_that_are_no_entries_are_passed_over(tmp_path):
    file = tmp_path / "history"
    file.write_bytes(b'"good"\nnot json\n\xff\xfe\n5\n"cut')
    assert read_history(file) == ["good"]
    assert read_history(tmp_path / "none") == []
    assert read_history(tmp_path) == []


def test_a_long_history_is_shortened(tmp_path):
    file = tmp_path / "history"
    file.write_text("".join(f"{json.dumps(str(number))}\n" for number in range(2 * MOST + 1)))
    last = [str(number) for number in range(MOST + 1, 2 * MOST + 1)]
    assert read_history(file) == last
    assert len(file.read_text().splitlines()) == MOST
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("state", "where"), [("/some/where", "/some/where"), ("", "~/.local/state"), ("rel", "~/.local/state")]
)
def test_where_it_is(monkeypatch, tmp_path, state, where):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", state)
    assert history_file() == (tmp_path / where.replace("~", str(tmp_path)) / "mosaic" / "history")
