"""mosaic-run --tune: what it prints, what it keeps, who uses it, and what it refuses."""

import json
import re

import pytest

from mosaic.runtime import tuning, tuning_trials
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.speeds import Speeds
from mosaic.runtime.tuned import TITLES
from support.mosaic_run import PROMPT

ROOM = 600 << 20
ANSWER = (PROMPT, "--temperature", 0, "--max-tokens", 12)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few trials of a few tokens, whose outcome is no matter, on two cores; a cache folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOSAIC_THREADS", raising=False)
    monkeypatch.setattr(tuning, "PAIRS", 1)
    monkeypatch.setattr(tuning_trials, "MOST_TOKENS", 4)
    monkeypatch.setattr(tuning_trials, "cores", lambda: 2)
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
    assert kept["threads"] == threads["after"]
    said = f"tuned: threads {threads['after']}"
    assert here(demo, "--plan", "--device", "cpu").stdout.splitlines()[-1] == said
    told = here(demo, *ANSWER, "--device", "cpu", "--stats", "text")
    assert said in told.stderr.splitlines()
    assert told.stdout == plain
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
    assert all(re.fullmatch(r"[\d,]+ +[\d,]+ +[\d.]+ +[\d.]+", line[24:].strip()) for line in lines[1:-1])
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


def test_a_folder_that_cannot_be_written_to(here, demo, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = here(demo, "--tune", "--device", "cpu")
    assert result.returncode == 2
    assert "threads" in result.stdout
    assert "cannot be kept" in result.stderr
    assert "XDG_CACHE_HOME" in result.stderr


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
        (("--device", "cpu", "--threads", 2), ("nothing is left to tune",)),
        (("--activations", "f16"), ("--activations", "f16")),
    ],
    ids=str,
)
def test_what_it_would_ignore_is_refused(refused, demo, options, words):
    refused(demo, "--tune", *options, words=words)
