"""mosaic-run --tune: what it prints, what it keeps, who uses it, and what it refuses."""

import errno
import json
import os
import re
from dataclasses import asdict

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime import machine, tuning, tuning_trials
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.speeds import Speeds
from mosaic.runtime.terminal.tuning import _table
from mosaic.runtime.tuned import TITLES, Tuned
from mosaic.runtime.tuning import Found
from support.mosaic_run import PROMPT

ROOM = 600 << 20
DOUBT = r"( +kept: [\d,]+ is too close to noise)?"
ANSWER = (PROMPT, "--temperature", 0, "--max-tokens", 12)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few trials of a few tokens, whose outcome is no matter, on two cores; a cache folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOSAIC_THREADS", raising=False)
    monkeypatch.setattr(tuning, "PAIRS", 1)
    monkeypatch.setattr(tuning_trials, "MOST_TOKENS", 4)
    for module in (machine, tuning_trials):
        monkeypatch.setattr(module, "cores", lambda: 2)
    for user in ("loading", "terminal.planning", "speeds"):
        monkeypatch.setattr(
            f"mosaic.runtime.{user}.speeds", lambda *_: Speeds(1e10, 1e9), raising=user != "terminal.planning"
        )


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, as far as anybody looks: the host's memory."""
    monkeypatch.setattr("mosaic.runtime.ops.cuda.find.find_gpu", lambda number: HostDevice(room=ROOM))


def fields(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_threads_are_tuned_kept_and_used(here, demo, tmp_path):
    plain = here(demo, *ANSWER, "--device", "cpu").stdout
    found = fields(here(demo, "--tune", "--device", "cpu", "--stats", "json"))
    assert found["device"] is None
    assert found["decode_tok_s"] > 0
    assert list(found["settings"]) == ["threads"]
    threads = found["settings"]["threads"]
    assert threads["finished"]
    assert 0 < threads["tok_s_before"] <= threads["tok_s_after"]
    assert found["tuned"].pop("threads") == threads["after"]
    assert set(found["tuned"].values()) == {None}
    ((key, kept),) = json.loads((tmp_path / "mosaic" / "tuned.json").read_text()).items()
    assert "no device" in key
    assert list(tmp_path.rglob("*.*")) == [tmp_path / "mosaic" / "tuned.json"]
    assert kept["threads"] == threads["after"]
    said = f"tuned: threads {threads['after']}"
    assert here(demo, "--plan", "--device", "cpu").stdout.splitlines()[-1] == said
    told = here(demo, *ANSWER, "--device", "cpu", "--stats", "text")
    assert said in told.stderr.splitlines()
    assert told.stdout == plain
    settings = asdict(Tuned(threads=threads["after"]))
    assert fields(here(demo, *ANSWER, "--device", "cpu", "--json"))["tuned"] == settings
    figures = here(demo, *ANSWER, "--device", "cpu", "--stats", "json").stderr.splitlines()[-1]
    assert json.loads(figures)["tuned"] == settings
    assert "tuned" not in here(demo, "--plan", "--device", "cpu", "--threads", 1).stdout
    assert "tuned" not in here(demo, *ANSWER, "--device", "cpu", "--stats", "text", "--threads", 1).stderr


def test_with_a_device_a_person_sees_all_of_it(here, demo, gpu):
    plain = here(demo, *ANSWER, "--device", "cpu").stdout
    result = here(demo, "--tune", "--context", 512)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["setting", "before", "after", "tok/s", "before", "after"]
    names = [name for name in TITLES if name not in ("vram", "piece")]  # there is room for everything, in one piece
    assert [line[:24].strip() for line in lines[1:-1]] == [TITLES[name] for name in names]
    assert all(re.fullmatch(rf"[\d,]+ +[\d,]+ +[\d.]+ +[\d.]+{DOUBT}", line[24:].strip()) for line in lines[1:-1])
    assert re.fullmatch(r"in \d+ s", lines[-1])
    assert re.search(r"^threads 2: [\d.]+ tok/s$", result.stderr, re.MULTILINE)
    plan = json.loads(here(demo, "--plan", "--stats", "json").stdout)
    assert all(plan["tuned"][name] for name in names)
    assert here(demo, *ANSWER).stdout == plain


def test_what_is_given_is_not_tuned(here, demo, gpu):
    found = fields(here(demo, "--tune", "--threads", 2, "--vram", "2MiB", "--context", 512, "--stats", "json"))
    assert list(found["settings"]) == ["min_hits", "stream_tokens"]
    assert found["tuned"]["threads"] is found["tuned"]["vram"] is found["tuned"]["vram_budget"] is None


def test_without_time_it_says_what_it_did_not_get_to(here, demo, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    result = here(demo, "--tune", "--device", "cpu")
    assert "tok/s as it is" in result.stderr
    assert result.stdout.splitlines()[1].split()[-2:] == ["-", "-"]
    assert "no time was left for more of: threads" in result.stdout
    assert "tuned" not in here(demo, "--plan", "--device", "cpu").stdout


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing may be loaded."""
    monkeypatch.setattr(tuning_trials.Rig, "__init__", lambda *_: pytest.fail("loaded"))


def test_it_says_where_it_was_kept_and_what_it_put_aside(here, demo, tmp_path):
    file = tmp_path / "mosaic" / "tuned.json"
    file.parent.mkdir()
    file.write_text("{damaged")
    result = here(demo, "--tune", "--device", "cpu")
    assert result.returncode == 0
    assert result.stderr.splitlines()[-1] == f"kept in {file}"
    assert f"note: {file} could not be read, and is now tuned.json.damaged" in result.stderr
    assert (file.parent / "tuned.json.damaged").read_text() == "{damaged"


def test_the_table_says_why_a_value_was_not_taken():
    found = {"threads": Found(4, 4, 0.1, finished=True, doubted=3), "min_hits": Found(2, 1, 0.1, 1.5, finished=True)}
    lines = _table(found, 3.0)
    assert lines[1].endswith("10.00       10.00  kept: 3 is too close to noise")
    assert lines[2].endswith("15.00")


def test_a_cache_that_cannot_be_a_folder_is_refused_at_once(refused, demo, monkeypatch, tmp_path, unloaded):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    words = ("cannot be kept", str(tmp_path / "file" / "mosaic"), "Not a directory", "XDG_CACHE_HOME")
    refused(demo, "--tune", "--device", "cpu", words=words)


def test_a_folder_in_the_files_place_is_refused_at_once(refused, demo, tmp_path, unloaded):
    file = tmp_path / "mosaic" / "tuned.json"
    file.mkdir(parents=True)
    refused(demo, "--tune", "--device", "cpu", words=("cannot be kept", str(file), "found:    a folder", "remove it"))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(refused, demo, monkeypatch, tmp_path, unloaded):
    def read_only(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "a temporary name")

    monkeypatch.setattr("mosaic.runtime.kept.TemporaryFile", read_only)
    words = ("cannot be kept", str(tmp_path / "mosaic"), "Read-only", "XDG_CACHE_HOME")
    refused(demo, "--tune", "--device", "cpu", words=words)


@pytest.mark.parametrize("moment", ["__init__", "write", "decode"])
def test_ctrl_c_keeps_nothing(here, demo, monkeypatch, tmp_path, moment):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning_trials.Rig, moment, interrupted)
    result = here(demo, "--tune", "--device", "cpu")
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "stopped: nothing was kept"
    assert not list((tmp_path / "mosaic").iterdir())


def test_what_leaves_no_choice_is_named_before_anything_is_loaded(refused, demo, monkeypatch, unloaded):
    def check(*options, found, remedy):
        words = ("nothing is left to tune", f"found:    {found}\n", f"remedy:   {remedy}\n")
        refused(demo, "--tune", *options, words=words)

    leave = "leave --threads out"
    check("--device", "cpu", "--threads", 2, found="--threads 2, and --device cpu", remedy=leave)
    with monkeypatch.context() as patch:
        patch.setattr("mosaic.runtime.ops.cuda.find.find_gpu", no_gpu)
        check("--threads", 2, found="--threads 2, and no GPU that helps", remedy=leave)
    monkeypatch.setenv("MOSAIC_THREADS", "1")
    check("--device", "cpu", found="MOSAIC_THREADS=1, and --device cpu", remedy="unset MOSAIC_THREADS")
    check("--device", "cpu", "--threads", 2, found="--threads 2, and --device cpu", remedy=leave)
    monkeypatch.setenv("MOSAIC_THREADS", "")
    monkeypatch.setattr(machine, "cores", lambda: 1)
    check("--device", "cpu", found="one core, and --device cpu", remedy="none is needed: run it as it is")


def no_gpu(number):
    raise InputError("no GPU", remedy="buy one")


def test_what_leaves_no_choice_on_a_gpu_is_named(refused, demo, gpu, monkeypatch):
    monkeypatch.setattr(tuning_trials.Rig, "knobs", lambda *_: [])
    words = ("nothing is left to tune", "--threads 2, and a GPU with nothing to choose beside --vram, --gpu-layers")
    refused(demo, "--tune", "--threads", 2, "--vram", "2MiB", "--context", 512, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((PROMPT,), ("PROMPT means nothing with --tune",)),
        (("--session", "file"), ("--session means nothing with --tune",)),
        (("--plan",), ("--plan means nothing with --tune",)),
        (("--max-tokens", 3), ("--max-tokens means nothing with --tune",)),
        (("--ops", "reference"), ("--ops means nothing with --tune",)),
        (("--profile",), ("--profile means nothing with --tune",)),
        (("--stats", "live"), ("--stats live",)),
        (("--device", "cpu", "--vram", "1GiB"), ("--vram means nothing with --device cpu",)),
        (("--activations", "f16"), ("--activations", "f16")),
    ],
    ids=str,
)
def test_what_it_would_ignore_is_refused(refused, demo, options, words):
    refused(demo, "--tune", *options, words=words)
