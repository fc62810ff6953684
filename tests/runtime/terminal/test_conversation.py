"""Conversations: what is taken back, kept in files and read again; and files that are none."""

import json

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.terminal.conversation import Conversation
from mosaic.runtime.terminal.settings import Settings

ANSWER = {"role": "assistant", "content": "Blue.", "reasoning_content": "Light \u4e2d is scattered."}


@pytest.fixture
def conversation():
    made = Conversation(Settings())
    made.system = "Be brief."
    made.say("Which colour?")
    made.answer(ANSWER)
    return made


def test_the_system_message_comes_first_and_can_go(conversation):
    conversation.system = "Be long."
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[0]["content"] == "Be long."
    conversation.system = None
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    conversation.clear()
    assert conversation.messages == []
    conversation.system = "Be brief."
    conversation.clear()
    assert conversation.system == "Be brief."


def test_a_turn_is_taken_back(conversation):
    conversation.say("Why?")
    assert conversation.last == "Why?"
    assert conversation.take_back() == "Why?"
    assert conversation.take_back() == "Which colour?"
    assert conversation.take_back() is None
    assert conversation.system == "Be brief."


def test_a_file_keeps_all_of_it(conversation, tmp_path):
    file = tmp_path / "talk.json"
    conversation.settings.set("temperature", "0.6")
    conversation.settings.set("thinking", "off")
    conversation.save(file)
    again = Conversation(Settings())
    again.settings.set("seed", "1")  # not of the file
    again.load(file)
    assert again.messages == conversation.messages
    assert again.settings.changed == {"temperature": 0.6, "thinking": False}
    conversation.say("More")
    conversation.save(file)  # it was one
    again.load(file)
    assert again.last == "More"


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{",
        "{}",
        "\xff",
        json.dumps({"version": 2, "messages": []}),
        json.dumps({"messages": {}}),
        json.dumps({"messages": [], "settings": []}),
        json.dumps({"messages": [], "settings": {"top_p": 7}}),
        json.dumps({"messages": ["hello"]}),
        json.dumps({"messages": [{"role": "wizard", "content": "x"}]}),
        json.dumps({"messages": [{"role": "user"}]}),
        json.dumps({"messages": [{"role": "user", "content": 5}]}),
        json.dumps({"messages": [{"role": "user", "content": "a", "name": "b"}]}),
        json.dumps({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]}),
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}),
    ],
)
def test_what_is_no_conversation_is_neither_loaded_nor_written_over(conversation, tmp_path, document):
    file, before = tmp_path / "file", conversation.document()
    file.write_text(document, encoding="latin-1")
    for action in (conversation.load, conversation.save):
        with pytest.raises(InputError) as caught:
            action(file)
        assert "remedy" in caught.value.facts
    assert file.read_text(encoding="latin-1") == document
    assert conversation.document() == before


def test_files_that_cannot_be(conversation, tmp_path):
    for file in (tmp_path, tmp_path / "none" / "talk.json"):
        with pytest.raises(InputError):
            conversation.save(file)
    with pytest.raises(InputError, match="No such file"):
        conversation.load(tmp_path / "none.json")
