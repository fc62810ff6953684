"""--session: a conversation that goes on in the next process, and costs only what is new."""

import json
import os

from support.mosaic_run import assert_refused, run

GREEDY = ("--temperature", 0, "--max-tokens", 8, "--json")


def ask(model, file, prompt, *options) -> dict:
    result = run(model, prompt, *GREEDY, "--session", file, *options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_second_process_goes_on(demo, tmp_path):
    file = tmp_path / "talk.session"
    system = "You know all about " + "the sea, " * 20
    first = ask(demo, file, "Tell me about the sea.", "--system", system)
    second = ask(demo, file, "And then?")
    assert first["stats"]["reused_tokens"] == 0
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    assert second["stats"]["reused_tokens"] >= first["stats"]["prompt_tokens"] - 20
    for name in file.parent.iterdir():
        assert name == file  # nothing half written lies about


def test_settings_stay_unless_given_anew(demo, tmp_path):
    file = tmp_path / "talk.session"
    ask(demo, file, "Hello", "--presence-penalty", 0.5)
    run(demo, "Hello", "--session", file, "--temperature", 0, "--max-tokens", 3)
    third = json.loads(run(demo, "Hello", "--session", file, "--json").stdout)
    assert third["usage"]["completion_tokens"] <= 3


def test_a_damaged_session_is_refused_and_left_alone(demo, tmp_path):
    file = tmp_path / "talk.session"
    ask(demo, file, "Hello")
    os.truncate(file, file.stat().st_size // 2)
    before = file.read_bytes()
    assert_refused(run(demo, "Hello", "--session", file, "--max-tokens", 1), "talk.session", "remedy")
    assert file.read_bytes() == before
    file.write_text("something else")
    assert_refused(run(demo, "Hello", "--session", file, "--max-tokens", 1), "talk.session", "remedy")
    assert file.read_text() == "something else"
