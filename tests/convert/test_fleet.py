"""Several converters share one checkpoint: each some layers (`--layers`), one joins and verifies (`--finish`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mosaic.convert.cli import layer_range
from mosaic.convert.pipeline import convert, spans
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.convert.target import locked
from mosaic.convert.verify import verify
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

PROGRAM = Path(sys.executable).with_name("mosaic-convert")
LAYERS = 4


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    write_checkpoint(Tiny(layers=LAYERS, interval=2, experts=4, top_k=2), folder / "source")
    convert_folder(folder / "source", folder / "whole")
    return folder


@pytest.fixture
def source(originals):
    return originals / "source"


@pytest.fixture
def whole(originals):
    return tree(originals / "whole")


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def share(source, out, first, end, recipe="e4m3"):
    with Checkpoint(source) as checkpoint:
        return convert(make_plan(checkpoint, load_recipe(recipe)), out, workers=2, quiet=True, layers=range(first, end))


def finish(source, out, recipe="e4m3"):
    with Checkpoint(source) as checkpoint:
        return convert(make_plan(checkpoint, load_recipe(recipe)), out, workers=2, quiet=True, finish=True)


def program(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments), "--quiet"], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("shares", [[(0, 4)], [(2, 4), (0, 2)], [(3, 4), (1, 3), (0, 1)], [(0, 3), (1, 4)]], ids=str)
def test_shares_and_finish_give_the_bytes_of_one_run(source, whole, tmp_path, shares):
    out = tmp_path / "out"
    for first, end in shares:
        share(source, out, first, end)
        assert not (out / "mosaic.json").exists()
        assert not (out / "outside.safetensors").exists()
    stamps = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert len(stamps) == LAYERS
    assert finish(source, out)
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())
    assert tree(out) == whole


def test_a_share_writes_its_layers_only_and_only_once(source, tmp_path):
    out = tmp_path / "out"
    share(source, out, 1, 3)
    files = {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert files.keys() == {"layers-01.safetensors", "layers-02.safetensors"}
    share(source, out, 1, 3)
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")} == files


def test_a_plain_run_completes_what_shares_began(source, whole, tmp_path):
    out = tmp_path / "out"
    share(source, out, 1, 3)
    convert_folder(source, out)
    assert tree(out) == whole
    assert not share(source, out, 0, 2)  # complete already
    assert not finish(source, out)
    assert tree(out) == whole


def test_finish_refuses_while_layers_are_missing(source, tmp_path):
    out = tmp_path / "out"
    share(source, out, 1, 2)
    before = tree(out)
    with pytest.raises(InputError, match=r"0:1, 2:4"):
        finish(source, out)
    assert tree(out) == before


def test_shares_of_two_recipes_do_not_mix(source, tmp_path):
    out = tmp_path / "out"
    share(source, out, 0, 2)
    before = tree(out)
    with pytest.raises(InputError, match="another conversion"):
        share(source, out, 2, 4, recipe="experts-only")
    with pytest.raises(InputError, match="another conversion"):
        finish(source, out, recipe="experts-only")
    assert tree(out) == before


def test_overlapping_shares_exclude_each_other(source, tmp_path):
    out = tmp_path / "out"
    with locked(out, range(1, 3)):
        for first, end in ((0, 2), (2, 3), (2, 4), (0, 4)):
            with pytest.raises(InputError, match="another mosaic-convert"):
                share(source, out, first, end)
        with pytest.raises(InputError, match="another mosaic-convert"):
            convert_folder(source, out)
        assert not list(out.glob("*.safetensors"))
        share(source, out, 0, 1)
        share(source, out, 3, 4)
    with locked(out, None), pytest.raises(InputError, match="another mosaic-convert"):
        share(source, out, 1, 2)
    share(source, out, 1, 3)
    with locked(out, range(3, 4)), pytest.raises(InputError, match="another mosaic-convert"):
        finish(source, out)
    assert finish(source, out)
    assert all(result.holds for result in verify(out))


def test_processes_at_the_same_time(source, whole, tmp_path):
    out = tmp_path / "out"
    commands = [[PROGRAM, source, out, "--layers", f"{layer}:{layer + 1}", "--quiet"] for layer in range(LAYERS)]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(120) for process in processes] == [0] * LAYERS
    done = program(source, out, "--finish")
    assert done.returncode == 0, done.stderr
    assert "every invariant of the format holds" in done.stdout
    assert tree(out) == whole


def test_what_the_program_says(source, tmp_path):
    out = tmp_path / "out"
    first = program(source, out, "--layers", "1:3")
    assert "missing: layers 0:1, 3:4" in first.stdout
    assert json.loads(program(source, out, "--layers", ":1", "--json").stdout)["missing_layers"] == [3]
    assert "--finish" in program(source, out, "--layers", "3:").stdout
    done = json.loads(program(source, out, "--finish", "--json").stdout)
    assert (done["written"], done["verified"]) == (True, True)
    again = program(source, out, "--finish")
    assert again.returncode == 0
    assert "already complete" in again.stdout
    assert "holds" in again.stdout


def test_finish_finds_what_was_damaged_after_its_share(source, tmp_path):
    out = tmp_path / "out"
    share(source, out, 0, LAYERS)
    file = out / "layers-02.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = program(source, out, "--finish")
    assert done.returncode == 1
    assert "layers-02.safetensors" in done.stdout
    assert "V2" in done.stdout


@pytest.mark.parametrize("other", ["--overwrite", "--finish"])
def test_layers_stand_alone(source, tmp_path, other):
    done = program(source, tmp_path / "out", "--layers", "0:2", other)
    assert done.returncode == 2
    assert other in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "3", "4:", ":0", "2:2", "3:1", "0:5", "-1:2", "0:2:1", "a:b", "0:1,2:3", " 0:1", "٠:١", "0x0:1", ":99"]
)
def test_no_such_layers(text):
    with pytest.raises(InputError, match="0 <= FIRST < END <= 4"):
        layer_range(text, LAYERS)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0:4", range(4)), (":", range(4)), ("1:", range(1, 4)), (":2", range(2)), ("03:04", range(3, 4))],
)
def test_layers(text, layers):
    assert layer_range(text, LAYERS) == layers


def test_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0:3, 5:6, 7:9"
    assert spans([]) == ""
