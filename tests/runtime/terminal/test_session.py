"""--session: a conversation that goes on in the next process, and costs only what is new."""

import json
import os

import pytest

from support.mosaic_run import assert_refused

GREEDY = ("--temperature", 0, "--max-tokens", 8, "--json")


@pytest.fixture
def ask(here, demo, tmp_path):
    """What the demo says within the session of a file."""

    def call(file, prompt, *options: object) -> dict:
        result = here(demo, prompt, *GREEDY, "--session", file, *options)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return call


def test_the_second_run_goes_on(ask, tmp_path):
    file = tmp_path / "talk.session"
    system = "You know all about " + "the sea, " * 20
    first = ask(file, "Tell me about the sea.", "--system", system)
    second = ask(file, "And then?")
    assert first["stats"]["reused_tokens"] == 0
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    assert second["stats"]["reused_tokens"] >= first["stats"]["prompt_tokens"] - 20
    for name in file.parent.iterdir():
        assert name == file  # nothing half written lies about


def test_settings_stay_unless_given_anew(ask, here, demo, tmp_path):
    file = tmp_path / "talk.session"
    ask(file, "Hello", "--presence-penalty", 0.5)
    here(demo, "Hello", "--session", file, "--temperature", 0, "--max-tokens", 3)
    third = json.loads(here(demo, "Hello", "--session", file, "--json").stdout)
    assert third["usage"]["completion_tokens"] <= 3


def test_a_damaged_session_is_refused_and_left_alone(ask, here, demo, tmp_path):
    file = tmp_path / "talk.session"
    ask(file, "Hello")
    os.truncate(file, file.stat().st_size // 2)
    before = file.read_bytes()
    assert_refused(here(demo, "Hello", "--session", file, "--max-tokens", 1), "talk.session", "remedy")
    assert file.read_bytes() == before
    file.write_text("something else")
    assert_refused(here(demo, "Hello", "--session", file, "--max-tokens", 1), "talk.session", "remedy")
    assert file.read_text() == "something else"
