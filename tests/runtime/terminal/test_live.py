"""The line at the foot of a terminal: there while it is wanted, gone without a trace."""

import fcntl
import os
import pty
import struct
import termios
import time
from types import SimpleNamespace

import pytest

from mosaic.runtime.terminal import live
from mosaic.runtime.terminal.live import LiveLine


@pytest.fixture
def terminal(monkeypatch):
    """Standard error on a terminal of 24 lines; what it was sent can be read."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(live, "sys", SimpleNamespace(stderr=stream))  # pytest changes sys.stderr back before a test

        def sent() -> str:
            """All of it: what was written in several pieces may arrive so."""
            stream.flush()
            time.sleep(0.05)
            return os.read(master, 65536).decode()

        yield sent
    os.close(master)


def test_a_line_is_shown_and_taken_back(terminal):
    line = LiveLine()
    line.show("12 tokens, " + "x" * 100)
    sent = terminal()
    assert "\x1b[1;23r" in sent  # text scrolls above the last line
    assert "\x1b[24;1H" in sent
    assert "12 tokens, " + "x" * 29 + "\x1b" in sent  # cut to the terminal
    line.show("too soon")
    line.close()
    sent = terminal()
    assert "too soon" not in sent
    assert "\x1b[r" in sent
    line.close()  # nothing more to do
    print("end", file=live.sys.stderr, flush=True)
    assert terminal().strip() == "end"


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w+") as stream:
        monkeypatch.setattr(live, "sys", SimpleNamespace(stderr=stream))
        line = LiveLine()
        line.show("12 tokens")
        line.close()
        stream.seek(0)
        assert stream.read() == ""
