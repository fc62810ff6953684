"""The check of a card works without one, as far as can be: it says so, or is rehearsed, and finds what is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from device import check, kernels, needs, rates
from device.card import Rehearsal, attempt
from device.engine import BOUND, Reading, _compare
from device.lines import Report, read, table
from mosaic.format.index import crc32c
from mosaic.runtime.sampler import Chosen

FOLDER = Path(__file__).parent


def run(*options, **environment):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([FOLDER / "check.sh", *options], env=environment, capture_output=True, text=True)


def refused(*options, **environment):
    done = run(*options, **environment)
    assert done.returncode == 2
    assert not done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def report(tmp_path):
    return Report("part", tmp_path / "lines")


def test_without_a_card(tmp_path):
    (tmp_path / "triton.py").touch()  # not every Python that tests has it
    assert "no NVIDIA card" in refused("--quick", PYTHONPATH=str(tmp_path))


def test_help_needs_nothing():
    done = run("--help", PYTHON="/nonexistent")
    assert done.returncode == 0
    assert {f"--{name}" in done.stdout for name in ("quick", "parts", "layers", "build", "rehearse")} == {True}
    assert "set -" not in done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--parts", "rates,rate"], "no such part: rate ("),
        (["--parts="], "no such part"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--rehears"], "unrecognized"),
        (["--layers", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_come_before_the_card(options, told):
    done = refused(*options)
    assert told in done
    assert "card" not in done


@pytest.mark.parametrize("python", ["/nonexistent", "/", "false"])
def test_no_such_python(python):
    assert f"error: {python} is no Python" in refused(PYTHON=python)


def test_a_python_without_packages():
    """Of this Python, its standard library alone."""
    program = [sys.executable, "-S", str(FOLDER / "needs.py"), "--build"]
    done = subprocess.run(program, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert done.returncode == 2
    [told] = done.stderr.splitlines()
    lacking = (
        "torch, numpy, ml_dtypes, jinja2, tokenizers, typer, tqdm, pyyaml, safetensors, hypothesis, pytest, triton"
    )
    building = "pip, scikit-build-core, pybind11, cmake, ninja or make, gcc"
    assert told.startswith(f"error: {sys.executable} lacks {lacking}, {building}; ")


def test_an_old_pip(monkeypatch):
    monkeypatch.setattr(needs, "version", lambda name: "22.0.2")
    assert "a pip of at least 22.1 (it has 22.0.2)" in needs._missing(needs.options(["--build"]))
    monkeypatch.setattr(needs, "version", lambda name: "22.1b1")
    assert not needs._old_pip()


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: no such file')")
    (tmp_path / "triton.py").touch()
    assert "cannot be imported: libcudart.so" in refused(PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("out", ["file", "file/folder", "/proc/folder"])
def test_a_folder_that_cannot_be(out, tmp_path):
    (tmp_path / "file").touch()
    done = refused("--rehearse", OUT=str(tmp_path / out))
    assert done.startswith(f"error: OUT={tmp_path / out}: ")
    assert len(done.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_check_that_is_ended(number, code, tmp_path):
    """Of the part that it was in, and of those before it, it tells and keeps what there is."""
    (tmp_path / "machine.py").write_text("print('{}')")
    program = "import sys, time; from pathlib import Path; sys.path.insert(0, {!r}); from device.lines import Report\n"
    program += "name, file = sys.argv[1], Path(sys.argv[2]); Report(name, file).add('a', 1, 'GB/s')\n"
    program += "time.sleep(60 if name == 'rates' else 0)"
    (tmp_path / "part.py").write_text(program.format(str(FOLDER.parent)))
    program = (
        "import sys; from pathlib import Path; from device import check; from mosaic.format.program import run_program"
    )
    program += f"\ncheck.FOLDER = Path({str(tmp_path)!r}); run_program(check.main)"
    command = [sys.executable, "-c", program, "--parts", "engine,rates"]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OUT": str(tmp_path), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not process.stderr.readline().startswith("rates  a"):
        assert process.poll() is None
    kept = json.loads((tmp_path / "check.json").read_text())
    assert [(line["part"], line["what"]) for line in kept["lines"]] == [("engine", "a"), ("engine", "whole part")]
    process.send_signal(number)
    told, trouble = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in trouble
    _, _, *rows, _, verdict = told.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["engine", "engine", "rates", "rates"]
    assert verdict == "ended before all parts were run"
    kept = json.loads((tmp_path / "check.json").read_text())
    assert (len(kept["lines"]), kept["lines"][-1]["note"]) == (4, "stopped")
    assert not kept["finished"]
    assert not kept["passed"]
    assert {path.name for path in tmp_path.iterdir()} <= {"machine.py", "part.py", "check.json"}


def test_a_rehearsal(tmp_path):
    out = tmp_path / "no" / "folder"
    done = run("--rehearse", "--layers", "2", OUT=os.path.relpath(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "check.json").read_text())
    assert found["passed"]
    assert found["finished"]
    assert {line["part"] for line in found["lines"] if line["what"] == "whole part"} == set(check.LIMITS)
    count = {part: sum(line["part"] == part for line in found["lines"]) for part in check.LIMITS}
    assert count["kernels"] == 3
    assert count["engine"] == 1 + 3 * 3 * (2 + 1)  # arenas, layers on the card, prompts
    assert count["rates"] > 20
    assert count["speed"] > 10
    assert all(f"  {line['what']}  " in done.stdout for line in found["lines"])
    assert "all is right" in done.stdout
    assert "rehearsal" in found["machine"]["card"]


@pytest.mark.slow
def test_a_build_of_its_own():
    done = run("--rehearse", "--build", "--parts", "rates")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "build/device/site/mosaic/_native" in done.stdout


@pytest.mark.parametrize(
    ("end", "note"), [("time.sleep(60)", "stopped: out of time"), ("sys.exit(3)", "exit code 3"), ("", "")]
)
def test_a_part_that_does_not_end_well(end, note, monkeypatch, tmp_path):
    """What it found until then is there, but for a line that it was writing."""
    program = "import sys, time; from pathlib import Path; sys.path.insert(0, {!r}); from device.lines import Report\n"
    program += "file = Path(sys.argv[2]); Report('rates', file).add('a', 1, 'GB/s')\n"
    (tmp_path / "part.py").write_text(program.format(str(FOLDER.parent)) + end)
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    monkeypatch.setattr(check, "LIMITS", {"rates": 1})
    check._run("rates", ["8"], tmp_path / "lines", lines := [])
    one, whole = lines
    assert (one.what, one.value, one.failed) == ("a", 1, False)
    assert (whole.what, whole.note, whole.failed) == ("whole part", note, bool(note))


def test_lines(report, tmp_path):
    report.add("one", 1234.5, "GB/s", share=0.5)
    report.add("another", float("nan"), "tok/s", passed=True, note="why")
    report.add("third", 3, "", passed=False)
    with (tmp_path / "lines").open("a") as file:
        file.write('{"part": "pa')
    lines = read(tmp_path / "lines")
    assert [line.failed for line in lines] == [False, True, True]
    assert [line.as_dict()["value"] for line in lines] == [1234.5, None, 3]
    _, *rows = table(lines).splitlines()
    assert [row.split() for row in rows] == [
        ["part", "one", "1,234", "GB/s", "50%"],
        ["part", "another", "nan", "tok/s", "FAIL", "why"],
        ["part", "third", "3", "FAIL"],
    ]
    assert not read(tmp_path / "none")


def test_what_breaks_on_the_card_is_a_line(report, tmp_path):
    with attempt(Rehearsal(), report, "a kernel"):
        raise RuntimeError("out of resources\nand more")
    [line] = read(tmp_path / "lines")
    assert (line.failed, line.note) == (True, "RuntimeError: out of resources")


def test_outcomes_of_tests(report, tmp_path, monkeypatch):
    tests = tmp_path / "test_some.py"
    tests.write_text("""
import pytest

@pytest.fixture
def broken():
    raise AssertionError

def test_passes(): pass
def test_fails(): assert 0
def test_is_skipped(): pytest.skip("why")
def test_cannot_begin(broken): pass
""")
    monkeypatch.setattr(kernels, "REHEARSED", tests)
    kernels.run(Rehearsal(), report)
    lines = read(tmp_path / "lines")
    assert [(line.what, line.value, line.failed) for line in lines] == [
        ("test_some", 1, True),
        ("exit code of pytest", 1, True),
    ]
    assert lines[0].note == "2 failed, 1 skipped"


@pytest.mark.parametrize("operation", ["linear", "apply", "attention", "gated_delta", "upload"])
def test_a_wrong_kernel_is_found(operation, report, tmp_path):
    class Wrong(Rehearsal):
        def device(self):
            device = super().device()
            right = getattr(device.ops, operation, None)

            def wrong(*arguments):
                if operation == "apply":
                    right(*arguments)
                    arguments[-1][..., -1] *= 1.01
                    return None
                return right(*arguments) * 1.01

            if operation == "upload":
                device.upload = lambda source, target, after: after
            else:
                setattr(device.ops, operation, wrong)
            return device

    rates.run(Wrong(), report)
    failed = {line.what for line in read(tmp_path / "lines") if line.failed}
    words = {"linear": "matrix", "apply": "experts of", "attention": "attention", "gated_delta": "delta rule",
             "upload": "experts to the card"}  # fmt: skip
    assert failed
    assert all(words[operation] in what for what in failed)


def chosen(token, logprob, ahead=1.0):
    return Chosen(token, logprob, ((token, logprob), (token + 1, logprob - ahead)))


def reading(prompt, answer):
    return Reading(prompt, answer, hits=0, nbytes=0)


PROMPT = [chosen(number, -1.0) for number in range(200)]
ANSWER = [chosen(5, -1.0), chosen(6, -1.0, ahead=1e-4), chosen(7, -1.0)]


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (reading(PROMPT, ANSWER), True),
        (reading([chosen(number, -1.0 - BOUND / 2) for number in range(200)], ANSWER), True),
        (reading([*PROMPT[:199], chosen(199, -1.2)], ANSWER), True),  # one of 200 that was routed otherwise
        (reading([chosen(number, -1.0 - 2 * BOUND) for number in range(200)], ANSWER), False),
        (reading(PROMPT, [ANSWER[0], chosen(7, -1.0), chosen(9, -3.0)]), True),  # a tie, and then another text
        (reading(PROMPT, [chosen(6, -1.0), *ANSWER[1:]]), False),  # no tie
        (reading(PROMPT, ANSWER[:2]), False),
    ],
)
def test_readings(found, passes, report, tmp_path):
    _compare(report, "what", reading(PROMPT, ANSWER), found)
    [line] = read(tmp_path / "lines")
    assert line.failed is not passes, line


@pytest.mark.parametrize("count", [0, 1, 7, 8, 4097])
def test_the_substitute_for_crc32c(count):
    program = "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); import google_crc32c as substitute\n"
    program += "data = np.frombuffer(sys.stdin.buffer.read(), np.uint8)\n"
    program += "print(substitute.extend(0, data), substitute.extend(12345, data))"
    data = np.random.default_rng(count).bytes(count)
    command = [sys.executable, "-c", program, str(FOLDER / "substitutes")]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    assert done.stdout.split() == [b"%d" % crc32c(data), b"%d" % crc32c(data, 12345)]
