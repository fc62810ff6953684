"""Converters that are killed, and what must hold then: nothing finished is lost, nothing half is called complete.

For tests/kill and its torture. Knows the command line, the names in OUT that DESIGN.md promises, and nothing else.
"""

import filecmp
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

CATALOG = "mosaic.json"
WORK = ".mosaic-convert"
PATIENCE = 120  # seconds after which a converter is taken to hang


def program(name):
    return str(Path(sys.executable).with_name(name))


class Left(NamedTuple):
    """What a converter that was stopped left in OUT; for every file what changes when it is written again."""

    finished: dict  # shards with a final name and a record; with a catalog, all
    begun: dict  # shards that have only one of the two, or a .partial file

    @classmethod
    def of(cls, out):
        work = out / WORK
        finals = {file.name: file for file in out.glob("*.safetensors")}
        if (out / CATALOG).exists():
            return cls({name: _stamp(file) for name, file in finals.items()}, {})
        records = {file.name.removesuffix(".json"): file for file in work.glob("[!.]*.json")}
        partials = {file.name.removesuffix(".partial"): file for file in work.glob("*.partial")}
        finished = {name: _stamp(finals[name]) for name in finals.keys() & records.keys()}
        begun = {name: _stamp(file) for name, file in (finals | records | partials).items() if name not in finished}
        return cls(finished, begun)

    def begun_since(self, before):
        """The shards that were begun, and not finished, by the last converter alone."""
        return {name for name, stamp in self.begun.items() if before.begun.get(name) != stamp}

    def is_kept(self, out):
        """No finished shard was written again, though its record may be gone."""
        for name, stamp in self.finished.items():
            assert _stamp(out / name) == stamp, f"{name} was finished and is written again"


def left_in(out):
    return Left.of(out) if out.exists() else Left({}, {})


def _stamp(file):
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def difference(out, expected):
    """What is different in two directories, every name and every byte; None if nothing is."""
    if names(out) != names(expected):
        return f"names {sorted(set(names(out)) ^ set(names(expected)))}"
    files = [name for name in names(expected) if (expected / name).is_file()]
    different = [name for name in files if not filecmp.cmp(out / name, expected / name, shallow=False)]
    return f"contents of {different}" if different else None


def same_tree(out, expected):
    assert difference(out, expected) is None, f"{out}: {difference(out, expected)}"


def is_complete(out, expected):
    """Whether it is the directory that was expected, but for work in progress."""
    files = [name for name in names(out) if not name.startswith(WORK)]
    return files == names(expected) and all(filecmp.cmp(out / name, expected / name, shallow=False) for name in files)


def claims_nothing_false(out, *complete):
    """A directory with a catalog is one of those that are complete."""
    assert not (out / CATALOG).exists() or any(is_complete(out, expected) for expected in complete), names(out)


def is_refused(out):
    """By everything that reads model directories: exit code 2, in plain words."""
    for command in (["mosaic-verify", str(out)], ["mosaic-run", str(out), "text"]):
        done = subprocess.run([program(command[0]), *command[1:]], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2, (command, done.returncode, done.stderr)
        assert done.stderr.startswith("error: "), done.stderr
        assert "Traceback" not in done.stderr, done.stderr


class Converter:
    """A mosaic-convert in a process group of its own, with the slowest kernels: there is more to interrupt."""

    def __init__(self, source, out, *options, workers=1):
        self.source, self.out, self.workers = source, out, workers
        self.before = left_in(out)
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            _words(program("mosaic-convert"), source, out, "--quiet", "--workers", workers, *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"MOSAIC_ISA": "scalar"},
            start_new_session=True,
            # Whatever started the tests may have had Ctrl-C ignored, and that is handed down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def reach_work(self):
        """Wait until work in progress is there, or the end; the seconds that took from the start."""
        while not (self.out / WORK).exists() and self.process.poll() is None:
            time.sleep(0.0005)
        return time.monotonic() - self.begin

    def stop(self, number=signal.SIGKILL):
        """Send a signal to the whole group, wait for the end; whether that interrupted it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        code = self.end()
        assert code in (0, -number, 128 + number), (code, self.text)
        return code != 0 and not (self.out / CATALOG).exists()

    def end(self):
        """Wait for the end; the exit code. Its words are in `text`, its seconds in `seconds`."""
        try:
            _, self.text = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            raise AssertionError(f"{self.process.args} hangs") from None
        self.seconds = time.monotonic() - self.begin
        return self.process.returncode

    def left(self, begun=None):
        """What it left once stopped: whatever was there before, and no more than one shard per worker begun."""
        left = left_in(self.out)
        self.before.is_kept(self.out)
        assert self.before.finished.keys() <= left.finished.keys()
        most = self.workers if begun is None else begun
        assert len(left.begun_since(self.before)) <= most, f"{left.begun_since(self.before)}: at most {most}"
        return left


class Outcome(NamedTuple):
    """What became of a forked converter."""

    code: int
    text: str
    reached: bool
    meanwhile: "Outcome | None"


class Forker:
    """Forked converters that come to grief at the moment one likes; see tests/kill/forker.py. A context manager."""

    def __init__(self):
        script = Path(__file__).parent.parent / "kill" / "forker.py"
        settings = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(PATIENCE) == 0

    def convert(self, source, out, *options, workers=1, at=None, deed=None, meanwhile=None, only=None, short=False):
        """Convert; before moment number `at`, of the kind `only`, do the deed."""
        request = {"out": str(out), "at": at, "deed": deed, "only": only, "short": short}
        request["argv"] = _words(source, out, "--quiet", "--workers", workers, *options)
        if deed in ("stop", "stop kill"):
            request["meanwhile"] = _words(*(meanwhile or (source, out)), "--quiet")
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return _outcome(answer)

    def finish(self, source, out, *options, **settings):
        """Convert, undisturbed, and see that it ends well."""
        done = self.convert(source, out, *options, **settings)
        assert done.code == 0, done.text
        return done


def _outcome(answer):
    second = answer.get("meanwhile")
    return Outcome(answer["code"], answer["text"], answer["reached"], second and _outcome(second))


def _words(*words):
    return [str(word) for word in words]
