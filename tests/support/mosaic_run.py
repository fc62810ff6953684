"""mosaic-run as a finished process."""

import os
import subprocess
import sys
from pathlib import Path

from support.tiny_tokenizer import END_THINK

PROGRAM = str(Path(sys.executable).with_name("mosaic-run"))
PROMPT = "Tell me about the sea."
#: Has the tiny model think A, then say AAAA: A is likeliest, but for once after it came, when the end of thought is.
REASONED = ("--temperature", 0, "--max-tokens", 6, "--presence-penalty", 60,
            "--logit-bias", f"{ord('A')}=90", "--logit-bias", f"{END_THINK}=60")  # fmt: skip
PATIENCE = 30.0  # seconds for what takes two on an idle core


def run(*arguments: object, given: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A finished process. `given` is its standard input; what it prints has to be UTF-8."""
    data = given.encode() if isinstance(given, str) else given
    result = subprocess.run(
        [PROGRAM, *map(os.fsencode, map(str, arguments))],
        input=data,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(), result.stderr.decode(errors="replace")
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, found and remedy on standard error, no traceback, nothing on standard output."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
