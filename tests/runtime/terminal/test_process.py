"""mosaic-run as a process: its help, Ctrl-C, readers that go away, disks that are full."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.mosaic_run import PATIENCE, PROGRAM, PROMPT

LATER = ("torch", "tokenizers", "jinja2", "transformers", "prompt_toolkit", "tqdm")  # what --help has no use for


def test_help_is_complete_and_loads_no_torch():
    """By the list of imports, and in under a second of processor time, which a busy machine does not stretch."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", PROGRAM, "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert result.returncode == 0
    imported = {
        line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "mosaic.runtime.terminal.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in LATER}
    micros = [
        int(line.split("|")[1]) for line in result.stderr.splitlines() if re.match(r"import time:\s+\d+ \|", line)
    ]
    assert max(micros) < 1_000_000
    options = ("--demo", "--raw", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--context", "--kv")
    more = (
        "--threads",
        "--stats",
        "--ram",
        "--state-budget",
        "--plan",
        "--warm",
        "--record-routing",
        "--prefetch",
        "--check",
        "--json",
        "--version",
        "-f",
    )
    for option in (*options, *more):
        assert re.search(rf"{option}\b.*\w", result.stdout), option


def stopped(demo: Path, *options: str) -> tuple[bytes, bytes]:
    """Standard output and error of an answer that Ctrl-C ended after its first byte or some."""
    with subprocess.Popen(
        [PROGRAM, str(demo), PROMPT, "--temperature", "1", "--seed", "1", "--max-tokens", "5000", "--raw", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & ignores it
    ) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    return first + out, err


def test_ctrl_c_ends_an_answer_with_130_and_its_figures_are_told(demo):
    out, err = stopped(demo, "--stats", "json")
    assert out.endswith(b"\n")
    figures = json.loads(err.splitlines()[-1])
    assert figures["stop_reason"] == "cancelled"
    assert 0 < figures["generated_tokens"] < 5000


def test_a_reader_that_goes_away_is_no_traceback(demo):
    with subprocess.Popen(
        [PROGRAM, str(demo), PROMPT, "--raw", "--temperature", "1", "--seed", "1", "--max-tokens", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert b"Traceback" not in err
    assert process.returncode == 1  # typer's own for EPIPE


@pytest.mark.parametrize("program", ["mosaic-run", "mosaic-verify"])
def test_a_full_disk_behind_standard_output(program, demo):
    """/dev/full takes nothing: exit code 2 and a sentence, no traceback."""
    arguments = [str(demo), *(["hi", "--max-tokens", "2"] if program == "mosaic-run" else [])]
    script = str(Path(sys.executable).with_name(program))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([script, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_standard_input(demo):
    script = str(Path(sys.executable).with_name("mosaic-run"))
    done = subprocess.run(["bash", "-c", f"exec {script} {demo} - <&-"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr
