"""What all programs have in common."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROGRAMS = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_version(name):
    """Without the arguments that a program needs otherwise."""
    done = subprocess.run([Path(sys.executable).with_name(name), "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"mosaic \d+\.\d+\.\d+\n", done.stdout)
