"""--session: a conversation that goes on in the next process, and costs only what is new."""

import json
import os

import pytest

from support.mosaic_run import assert_refused
from support.pseudo_terminal import Terminal

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


def test_two_programs_do_not_overwrite_each_other(demo, tmp_path):
    """The one that comes second says so, and loses nothing of its own."""
    file, saved = tmp_path / "talk.session", tmp_path / "mine.json"
    options = ("--temperature", 0, "--max-tokens", 3, "--session", file)
    with Terminal(demo, *options, XDG_STATE_HOME=str(tmp_path)) as one:
        one.read_until(r">\s*$")
        with Terminal(demo, *options, XDG_STATE_HOME=str(tmp_path)) as other:
            other.read_until(r">\s*$")
            one.type("From the first\r")
            one.read_until(r"ended by max tokens\s+>\s*$")
            other.type("From the second\r")
            assert "changed by another program" in other.read_until(r"/save[^>]*>\s*$")
            other.type(f"/save {saved}\r")
            other.read_until(r"2 messages saved.*\s+>\s*$")
    assert b"From the first" in file.read_bytes()
    assert "From the second" in saved.read_text()


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
