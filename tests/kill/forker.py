"""Forks converters that come to grief at a moment chosen beforehand: before their Nth deed on the file system.

A fresh interpreter takes a third of a second, a fork of one that has imported everything takes none: so every single
moment can be tried, and not a sample of them. What is forked is the program itself: `main` of mosaic-convert, with its
arguments, its exit code and its standard error. Run as a script by support.killing.Forker; one JSON line in, one out.

A moment is an audit event of CPython (open for writing, rename, remove, mkdir, lock ...) or a call of one of the `os`
functions that write or make durable, which raise no event; with `only`, one such event. What happens there:

kill, int, term   a signal to itself, before the deed
stop              SIGSTOP; the forker then runs `meanwhile`, a second converter, to its end, and lets the first go on
stop kill         the same, but the first is killed then
error             the deed fails, once, with an input/output error
full              from then on no file can grow: what a disk without room does to every write
fill              the disk that `out` lies on is filled to the brim: to be done to a small one
"""

import contextlib
import errno
import gc
import io
import itertools
import json
import mmap
import os
import resource
import signal
import sys
from pathlib import Path

from mosaic.convert.cli import main

EVENTS = {
    *("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.utime"),
    *("os.chmod", "shutil.rmtree", "shutil.move", "shutil.copyfile", "fcntl.flock", "fcntl.lockf", "fcntl.fcntl"),
}
WRITES = ("write", "writev", "pwrite", "pwritev", "fsync", "fdatasync", "posix_fallocate", "sendfile")
READS = ("read", "readv", "pread", "preadv")
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}
SIGNALS |= {"stop": signal.SIGSTOP, "stop kill": signal.SIGSTOP}
HANGS = 60  # seconds after which a converter is taken to hang
BALLAST = "ballast"


class Moments:
    """Counts the moments of a converter and does the deed at one of them; `reached`, which its parent sees, tells."""

    def __init__(self, request, reached):
        self.out, self.at, self.deed = request["out"], request.get("at"), request.get("deed")
        self.short, self.only = request.get("short", False), request.get("only")
        self.reads = self.deed == "unreadable"
        self.reached, self.counter, self.busy = reached, itertools.count(1), False

    def install(self):
        for name in WRITES + READS:
            if hasattr(os, name):
                setattr(os, name, self.wrapped(name, getattr(os, name)))
        sys.addaudithook(self.heard)

    def wrapped(self, name, function):
        def call(*arguments, **options):
            if self.reads == (name in READS) and not self.only:
                self.count(None)
            if name in ("fsync", "fdatasync"):
                return None  # a kill is no power cut
            return function(*(_short(name, arguments) if self.short else arguments), **options)

        return call

    def heard(self, event, arguments):
        if self.reads or self.busy or not (event in EVENTS or (event == "open" and arguments[2] & 3)):
            return
        if self.only and event != self.only:
            return
        path = arguments[0]
        if isinstance(path, bytes | str | os.PathLike):
            file = Path(os.fsdecode(path))
            if file.is_absolute() and not file.is_relative_to(self.out):
                return
        self.count(path)

    def count(self, path):
        if next(self.counter) == self.at:  # next() on a count is atomic
            self.reached[0], self.busy = 1, True
            try:
                self.do(path)
            finally:
                self.busy = False

    def do(self, path):
        if self.deed in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.deed])
        elif self.deed in ("error", "unreadable"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path if isinstance(path, str) else None)
        elif self.deed == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self.deed == "fill":
            with contextlib.suppress(OSError), Path(self.out).with_name(BALLAST).open("wb", buffering=0) as ballast:
                while ballast.write(bytes(1 << 16)):
                    pass


def _short(name, arguments):
    """The arguments of a system call that moves less than it was asked to, as it may."""
    descriptor, what, *rest = arguments
    if name in ("write", "pwrite"):
        what = _half(what)
    elif name in ("writev", "pwritev", "readv", "preadv"):
        what = [_half(next(buffer for buffer in what if len(buffer)))]
    elif name in ("read", "pread"):
        what = -(-what // 2)
    return descriptor, what, *rest


def _half(buffer):
    """Half of it, in whole pages: with O_DIRECT the system moves no less."""
    data = memoryview(buffer).cast("B")
    return data[: -(-len(data) // 2 // mmap.PAGESIZE) * mmap.PAGESIZE]


def become(request, reached, output):
    """Make this process, just forked, the converter that is asked for; `main` is next."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 (as at a program's start)
    sys.argv = ["mosaic-convert", *request["argv"]]
    signal.alarm(HANGS)
    Moments(request, reached).install()


def fork(request):
    """(pid, whether it reached its moment, reading end of its output) of a new converter; None in the converter."""
    reached = mmap.mmap(-1, 1)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(request, reached, writing)
        return None
    os.close(writing)
    return pid, reached, reading


def outcome(pid, reached, reading, status=None):
    with open(reading, errors="replace") as stream:  # noqa: PTH123 (a descriptor)
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if status is None else status)
    return {"code": code, "text": text, "reached": bool(reached[0])}


def warm_up():
    """Import what the program imports only on its way, so that it need not be imported in every fork."""
    sys.argv = ["mosaic-convert", "/nowhere", "/nowhere"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        main()
    gc.collect()
    gc.freeze()


def serve():
    """Answer requests until there are no more (True), or until this process is a converter (False)."""
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        first = fork(request)
        if first is None:
            return False
        status = second = None
        if request.get("meanwhile"):
            _, status = os.waitpid(first[0], os.WUNTRACED)
            if os.WIFSTOPPED(status):
                status = None
                second = fork({"argv": request["meanwhile"], "out": request["out"]})
                if second is None:
                    return False
                second = outcome(*second)
                os.kill(first[0], signal.SIGKILL if request["deed"] == "stop kill" else signal.SIGCONT)
        print(json.dumps(outcome(*first, status=status) | {"meanwhile": second}), flush=True)
    return True


if __name__ == "__main__" and not serve():
    main()
