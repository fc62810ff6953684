"""Messages of the API in the form templates take, and those that are none."""

import copy

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.text.messages import for_template


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


def test_what_is_in_order_stays_as_it_is():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "", "name": "N"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "tool", "content": "T", "tool_call_id": "call_1"},
    ]
    assert for_template(messages) == messages


@pytest.mark.parametrize(
    ("arguments", "mapping"),
    [('{"a": [1, "é"]}', {"a": [1, "é"]}), ({"a": 1}, {"a": 1}), ("{}", {}), ("", {}), (" ", {}), (None, {})],
    ids=str,
)
def test_arguments_become_mappings(arguments, mapping):
    messages = [assistant(arguments)]
    before = copy.deepcopy(messages)
    (message,) = for_template(messages)
    assert message == {"role": "assistant", "content": "", "tool_calls": [call(mapping)]}
    assert messages == before  # the caller's history is the caller's


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_calls(calls):
    assert not for_template([{"role": "assistant", "content": "x", "tool_calls": calls}])[0].get("tool_calls")


def test_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\n"}, {"type": "text", "text": "é"}]
    for role in ("system", "user", "assistant", "tool"):
        assert for_template([{"role": role, "content": parts}]) == [{"role": role, "content": "a\né"}]
    assert for_template([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("message", "where", "expected"),
    [
        ("hi", "messages[1]", "role"),
        (None, "messages[1]", "role"),
        ({"content": "x"}, "messages[1]", "role"),
        ({"role": 1, "content": "x"}, "messages[1]", "role"),
        ({"role": "user"}, "messages[1].content", "string"),
        ({"role": "user", "content": None}, "messages[1].content", "string"),
        ({"role": "user", "content": 5}, "messages[1].content", "string"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[1].content", "string"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]", "text only"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0]", "text only"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]", "text only"),
        ({"role": "user", "content": [{"type": "image", "text": "x"}]}, "messages[1].content[0]", "text only"),
        ({"role": "assistant", "content": "", "tool_calls": "f"}, "messages[1].tool_calls", "list"),
        ({"role": "assistant", "content": "", "tool_calls": 1}, "messages[1].tool_calls", "list"),
        ({"role": "assistant", "content": "", "tool_calls": [1]}, "messages[1].tool_calls[0]", "function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0]", "function"),
        (assistant("{"), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (assistant("[1]"), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (assistant("[" * 100_000), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (assistant(7), "messages[1].tool_calls[0].function.arguments", "JSON object"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_message_that_is_not_sound_is_named(message, where, expected):
    with pytest.raises(InputError) as caught:
        for_template([{"role": "user", "content": "x"}, message])
    assert caught.value.problem == f"{where} cannot be used"
    assert expected in caught.value.facts["expected"]
