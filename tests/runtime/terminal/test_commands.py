"""Commands of the chat, each held to what it does to a conversation; wrong ones are explained."""

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.request import Stats
from mosaic.runtime.terminal.commands import COMMANDS, Outcome, is_command, run
from mosaic.runtime.terminal.conversation import Conversation
from mosaic.runtime.terminal.settings import KINDS, Settings


@pytest.fixture
def talk():
    made = Conversation(Settings())
    made.say("Which colour?")
    made.answer({"role": "assistant", "content": "Blue."})
    return made


def do(talk, text, figures=None) -> Outcome:
    assert is_command(text)
    return run(text, talk, figures)


@pytest.mark.parametrize("text", ["/usr/bin/env", "// a comment", "/2", "a /help", "", "/* C */", "/a-b"])
def test_what_is_no_command(text):
    assert not is_command(text)


def test_help_names_every_command():
    text = do(Conversation(Settings()), "/help").text
    assert all(f"/{name}" in text for name in COMMANDS)
    assert do(Conversation(Settings()), "/?").text == text


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("/hlep", "/help"), ("/lod x", "/load"), ("/SETT", "/set"), ("/xyzzy", "all of them"), ("/", "/help")],
)
def test_wrong_commands_are_explained(talk, typed, nearest):
    with pytest.raises(InputError, match="no such command") as caught:
        do(talk, typed)
    assert nearest in caught.value.facts["remedy"]


def test_system(talk):
    assert do(talk, "/system").text == "system: none"
    do(talk, "/system Be brief.\nVery.")
    assert talk.system == "Be brief.\nVery."
    assert "Be brief" in do(talk, "/system").text
    do(talk, "/system off")
    assert talk.system is None


def test_clear_undo_and_retry(talk):
    do(talk, "/system Be brief.")
    assert do(talk, "/retry") == Outcome(answer=True)
    assert talk.messages[1:] == [{"role": "user", "content": "Which colour?"}]
    assert do(talk, "/undo").text == "taken back: Which colour?"
    for command in ("/undo", "/retry"):
        with pytest.raises(InputError):
            do(talk, command)
    talk.say("x")
    assert "system message" in do(talk, "/clear").text
    assert [message["role"] for message in talk.messages] == ["system"]


def test_settings(talk):
    shown = do(talk, "/set").text.splitlines()
    assert [line.split()[0] for line in shown] == list(KINDS)
    assert do(talk, "/set --top-p 0.5").text == "top_p: 0.5"
    assert do(talk, "/set logit_bias 5=1 6=-inf").text == "logit_bias: 5=1 6=-inf"
    assert talk.settings.sampling == {"top_p": 0.5, "logit_bias": {5: 1.0, 6: float("-inf")}}
    assert do(talk, "/set seed").text == "seed: default"
    do(talk, "/set top_p default")
    do(talk, "/think off")
    assert talk.settings.changed.keys() == {"logit_bias", "thinking"}
    assert do(talk, "/think").text == "thinking: off"
    with pytest.raises(InputError) as caught:
        do(talk, "/set temprature 1")
    assert "did you mean temperature?" in caught.value.facts["remedy"]
    for wrong in ("/set temperature warm", "/think perhaps"):
        with pytest.raises(InputError, match="not usable"):
            do(talk, wrong)


def test_save_and_load(talk, tmp_path):
    file = tmp_path / "my talk.json"
    assert "2 messages saved" in do(talk, f"/save {file}").text
    do(talk, "/clear")
    assert "2 messages loaded" in do(talk, f"/load {file}").text
    assert talk.last == "Which colour?"
    for command in ("/save", "/load"):
        with pytest.raises(InputError, match="needs a file"):
            do(talk, command)


def test_stats_and_exit(talk):
    assert do(talk, "/stats").text == "no answer yet"
    shown = do(talk, "/stats", Stats(prompt_tokens=1234, stop_reason="max tokens").as_dict()).text
    assert "1,234" in shown
    assert "max tokens" in shown
    assert do(talk, "/exit").over
    assert do(talk, "/quit").over


def test_what_needs_a_template_is_refused_without_one():
    talk = Conversation(Settings(), raw=True)
    for command in ("/system x", "/think on"):
        with pytest.raises(InputError, match="--raw"):
            do(talk, command)
