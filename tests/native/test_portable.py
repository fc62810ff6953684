"""Everything but the x86 units compiles without x86: what another machine would compile, by this one's compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "native" / "src"
X86 = ("isa_avx", "isa_amx")
UNITS = sorted(file.name for file in SOURCES.glob("*.cpp") if not file.name.startswith(("bindings", *X86)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("unit", UNITS)
def test_compiles_without_x86(unit, tmp_path):
    """The header of intrinsics is not there, and the baseline's own macros are off."""
    (tmp_path / "immintrin.h").write_text("#error this is for x86 only\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", SOURCES / unit]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_baseline_units_are_found():
    assert {"isa_scalar.cpp", "linear.cpp", "sequence.cpp", "thread_pool.cpp"} <= set(UNITS)
