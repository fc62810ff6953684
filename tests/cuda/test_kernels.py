"""The kernels under triton's interpreter, in a process of its own: see tests/cuda/kernels/conftest.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels for GPUs: install triton (`just test-gpu`)")
KERNELS = Path(__file__).parent / "kernels"
ROOT = KERNELS.parents[2]


def passed(*options):
    """How many tests did, of all."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(KERNELS)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return int(re.search(r"(\d+) passed", result.stdout)[1])


def test_every_kernel_is_within_its_bound():
    assert passed() > 100


@pytest.mark.slow
def test_the_demo():
    assert passed("-m", "slow") == 1
