"""A process on a pseudo terminal of its own, so that Ctrl-C reaches it as from a keyboard."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from typing import IO

from support.mosaic_run import PATIENCE, PROGRAM

WHERE_IS_THE_CURSOR = b"\x1b[6n"
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>78])")
COLUMNS, ROWS = 100, 30


def plain(text: str) -> str:
    """What was sent to a terminal, without escape sequences and carriage returns."""
    return ESCAPES.sub("", text).replace("\r", "").replace("\b", "")


class Terminal:
    """mosaic-run on a terminal of kind `term`.

    With `errors` its standard error, with `out` its standard output is not there but in a pipe, or this file.
    """

    def __init__(
        self,
        *arguments: object,
        term: str = "xterm-256color",
        errors: bool = False,
        out: IO[bytes] | None = None,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            stdin=slave,
            stdout=out or slave,
            stderr=subprocess.PIPE if errors else slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": term, **environment},
        )
        os.close(slave)
        self.sent = b""  # everything that was read from it

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()
        os.close(self.master)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def type_bytes(self, *keys: bytes) -> None:
        """Each in a write of its own, with time in between to be read alone."""
        for key in keys:
            os.write(self.master, key)
            time.sleep(0.01)

    def read_until(self, pattern: str) -> str:
        """What was printed up to a match at the end of it, without escape sequences."""
        seen, end = b"", time.monotonic() + PATIENCE
        while not re.search(pattern, plain(seen.decode(errors="replace"))):
            data = self._read(end)
            assert data, f"ended, or waited too long, before {pattern!r}; saw {seen!r}"
            seen += data
        return plain(seen.decode(errors="replace"))

    def end(self) -> int:
        """Read to the end of the process; its exit code."""
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self.process.wait(1)

    def _read(self, end: float) -> bytes:
        """What there is; nothing once the process is gone or it is too late.

        Answers where the cursor is, as a terminal does: in the last line, so that nothing is drawn below.
        """
        if not select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
            return b""
        try:
            data = os.read(self.master, 4096)
        except OSError:
            return b""
        if WHERE_IS_THE_CURSOR in data:
            os.write(self.master, b"\x1b[%d;1R" % ROWS)
        self.sent += data
        return data
