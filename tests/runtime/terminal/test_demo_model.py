"""The embedded demo, converted on first use: once, by whoever comes first, into a cache that may be anything."""

import os
import subprocess
from pathlib import Path

import pytest

from mosaic import recipes
from mosaic.recipes import DEMO_CHECKPOINT, demo_model
from support.mosaic_run import PATIENCE, PROGRAM, PROMPT, assert_refused, run


def test_two_first_uses_of_the_demo_at_once_and_a_second_use(tmp_path):
    command = [PROGRAM, "--demo", PROMPT, "--temperature", "0", "--max-tokens", "4"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert any("converting the embedded demo" in err for _, err in results)
    assert len(list((tmp_path / "mosaic").iterdir())) == 1  # one model, no scratch left
    again = run("--demo", PROMPT, "--temperature", 0, "--max-tokens", 4, XDG_CACHE_HOME=str(tmp_path))
    assert again.stdout == results[0][0]
    assert "converting" not in again.stderr


@pytest.fixture
def conversion(monkeypatch, tmp_path):
    """demo_model with a converter that writes only a catalog, and runs `meanwhile` before it ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "mosaic" / f"demo-{recipes._digest(DEMO_CHECKPOINT)}"

    def prepare(meanwhile=lambda model: None) -> Path:
        def convert(command: list[str], **_: object) -> None:
            made = Path(command[-2])
            made.mkdir()
            (made / "mosaic.json").write_text("mine")
            meanwhile(model)

        monkeypatch.setattr(recipes.subprocess, "run", convert)
        return model

    return prepare


@pytest.mark.parametrize("options", [("--kv", "int8"), ("--ops", "gpu"), ("--activations", "f16")])
def test_options_are_checked_before_the_demo_is_converted(options, tmp_path):
    found = run("--demo", *options, "Ruth", XDG_CACHE_HOME=str(tmp_path))
    assert found.returncode == 2, found
    assert options[1] in found.stderr
    assert not list(tmp_path.iterdir())


def test_the_demo_is_converted_once(conversion, capsys):
    model = conversion()
    assert demo_model() == model
    assert (model / "mosaic.json").read_text() == "mine"
    assert "converting" in capsys.readouterr().err
    assert demo_model() == model
    assert capsys.readouterr().err == ""


def test_remains_without_a_catalog_are_replaced(conversion):
    model = conversion()
    model.mkdir(parents=True)
    (model / "layers-00.safetensors").write_text("half")
    assert demo_model() == model
    assert [file.name for file in model.iterdir()] == ["mosaic.json"]


def test_a_model_that_another_process_finished_meanwhile_stays(conversion):
    """It may be mapped by that process, or half read."""

    def meanwhile(model: Path) -> None:
        model.mkdir()
        (model / "mosaic.json").write_text("theirs")

    model = conversion(meanwhile)
    assert demo_model() == model
    assert (model / "mosaic.json").read_text() == "theirs"


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(run("--demo", PROMPT, XDG_CACHE_HOME=str(tmp_path / "file")), str(tmp_path / "file"))
