"""mypy --strict over the packages as they are installed.

On an editable install mypy checks nothing and reports success, so it runs over a tree of links, and a planted error
proves that it does read the sources.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def tree(tmp_path):
    package = tmp_path / "mosaic"
    (package / "recipes").mkdir(parents=True)
    for name in ("format", "convert", "runtime"):
        (package / name).symlink_to(ROOT / name)
    (package / "recipes" / "__init__.py").symlink_to(ROOT / "recipes" / "__init__.py")
    (package / "_native.pyi").symlink_to(ROOT / "native" / "_native.pyi")
    return tmp_path


def mypy(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "mosaic"]
    environment = {"MYPYPATH": str(tree), "MYPY_CACHE_DIR": str(ROOT / "build" / "mypy"), "PATH": ""}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_sources_are_typed(tree):
    result = mypy(tree)
    assert result.returncode == 0, result.stdout
    checked = int(re.search(r"in (\d+) source files", result.stdout)[1])
    assert checked > 40


def test_a_planted_error_is_found(tree):
    planted = tree / "mosaic" / "planted.py"
    planted.write_text("from mosaic.format.e4m3 import grid\n\nwrong: str = grid((1, 2))\n")
    result = mypy(tree)
    assert result.returncode == 1
    assert "planted.py:3: error: Incompatible types" in result.stdout
