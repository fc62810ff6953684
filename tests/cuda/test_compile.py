"""Every kernel compiles for every GPU it is meant for, without spills (but sm_75), atomics and native FP8."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels for GPUs: install triton (`just test-gpu`)")
COMPILE = Path(__file__).with_name("compile.py")
KERNELS = {
    *("matvec._matvec", "matmul._matmul", "matmul._matmul_plain", "split._split", "norms._rms_norm", "gates._gated"),
    *("experts._gate_up", "experts._down", "experts._add_outputs", "grouped._gate_up", "grouped._down"),
    *("router._route", "rotary._rotate", "pages._store", "attention_tiles._tile"),
    *("attention._segment", "attention._merge", "delta_conv._step", "delta_conv._conv"),
    *("delta._step", "delta_chunk._solve", "delta_chunk._walk", "delta_chunk._norm"),
}


def compiled(*targets):
    command = [sys.executable, str(COMPILE), *targets, "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(result.stdout)
    for target in targets:
        assert {row["kernel"].split()[0] for row in rows if row["target"] == target} == KERNELS
    return rows


def test_one_target():
    """With --json come figures; the program itself fails if one of them is not right."""
    assert all(row["registers"] > 8 for row in compiled("sm_89"))


@pytest.mark.slow
def test_all_targets():
    compiled("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
