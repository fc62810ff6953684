"""The wheel, alone in a fresh environment: programs, package data and --demo work without the source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("mosaic_moe-*.whl"))


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for expected in (
        "mosaic/__init__.py",
        "mosaic/py.typed",
        "mosaic/format/e4m3.py",
        "mosaic/convert/cli.py",
        "mosaic/runtime/ops/reference.py",
        "mosaic/runtime/serve/page/index.html",
        "mosaic/runtime/serve/page/app.js",
        "mosaic/runtime/hardware/rtx4060-laptop.yaml",
        "mosaic/runtime/simulator/qwen3.6-35b-a3b.json",
        "mosaic/runtime/simulator/synthetic-35b.trace",
        "mosaic/recipes/e4m3.yaml",
        "mosaic/recipes/demo/checkpoint/config.json",
    ):
        assert expected in names
    assert any(name.startswith("mosaic/_native") and name.endswith(".so") for name in names)
    assert not [name for name in names if "/training/" in name or name.startswith(("tests/", "format/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_demo_from_the_wheel(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    binaries = tmp_path / "venv" / "bin"
    subprocess.run([str(binaries / "pip"), "install", "--quiet", str(wheel)], check=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*command):
        return subprocess.run(
            [str(binaries / command[0]), *command[1:]],
            cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip

    first = run("mosaic-run", "--demo", "Tell me about Ruth 1.", "--max-tokens", "20", "--temperature", "0")
    assert len(first.stdout.split()) > 5
    assert "converting the embedded demo" in first.stderr
    again = run("mosaic-run", "--demo", "Tell me about Ruth 1.", "--max-tokens", "20", "--temperature", "0")
    assert again.stdout == first.stdout
    assert again.stderr == ""
    assert "FAILED" not in run("mosaic-verify", "--demo").stdout
