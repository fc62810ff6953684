"""Prompts with their boundaries, and replies that go back into the history as they were."""

import json
import re

import pytest

from mosaic.format.errors import InputError
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.text.dialogue import OWN_VARIABLES, Dialogue, message_of
from mosaic.runtime.text.pieces import Piece, PieceKind, ToolCall
from mosaic.runtime.text.template import TEMPLATE_FILE, ChatTemplate
from mosaic.runtime.tokenizer import Tokenizer
from support.templates import QWEN3, QWEN3_5
from support.tiny_tokenizer import IM_START

DEMO = (DEMO_CHECKPOINT / TEMPLATE_FILE).read_text()
TEMPLATES = {"demo": DEMO, "qwen3": QWEN3, "qwen3_5": QWEN3_5}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "w",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 世界 👨‍👩‍👧‍👦"},
    {"role": "assistant", "content": "<think> is a tag."},
    {"role": "user", "content": "Ends in <think>"},
]
REPLY = {
    "qwen3": 'Let me see.\n<tool_call>\n{"name": "w", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
    "qwen3_5": (
        "Let me see.\n\n<tool_call>\n<function=w>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.fixture
def dialogue_of(tmp_path, bytewise):
    def make(template: str, tokenizer: Tokenizer = bytewise) -> Dialogue:
        (tmp_path / TEMPLATE_FILE).write_text(template)
        return Dialogue(tokenizer, ChatTemplate(tmp_path))

    return make


def replied(dialogue, prompt, text, tokenizer, tools=None):
    reader = dialogue.reader(prompt, tools=tools)
    return [piece for token in tokenizer.encode(text) for piece in reader.push(token)] + reader.finish()


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_rendered_text_with_a_boundary_before_each_message(dialogue_of, bytewise, name, thinking):
    dialogue = dialogue_of(TEMPLATES[name])
    prompt = dialogue.prompt(MESSAGES, thinking=thinking)
    starts = [match.start() for match in re.finditer(re.escape("<|im_start|>"), prompt.text)]
    assert prompt.tokens == bytewise.encode(prompt.text)
    assert prompt.boundaries == [len(bytewise.encode(prompt.text[:start])) for start in starts[1:]]
    assert len(prompt.boundaries) == 4
    assert all(prompt.tokens[position] == IM_START for position in prompt.boundaries)
    past = dialogue._template.render(MESSAGES, generate=False)
    assert prompt.tokens[: prompt.boundaries[-1]] == bytewise.encode(past)


@pytest.mark.parametrize(
    ("name", "thinking", "inside"),
    [
        ("demo", None, False), ("demo", True, True), ("demo", False, False),
        ("qwen3", None, False), ("qwen3", True, False), ("qwen3", False, False),
        ("qwen3_5", None, True), ("qwen3_5", True, True), ("qwen3_5", False, False),
    ],
)  # fmt: skip
def test_the_prompt_tells_whether_it_opened_the_reasoning(dialogue_of, bytewise, name, thinking, inside):
    dialogue = dialogue_of(TEMPLATES[name])
    prompt = dialogue.prompt(MESSAGES, thinking=thinking)
    assert prompt.inside_reasoning is inside
    said = {piece.kind: piece.text for piece in replied(dialogue, prompt, "hm\n</think>\n\nYes.", bytewise)}
    assert (PieceKind.REASONING in said) is inside
    opened = replied(dialogue, prompt, "<think>\nhm\n</think>\n\nYes.", bytewise)
    assert message_of(opened) == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


def test_the_demo_with_its_own_tokenizer():
    tokenizer = Tokenizer(DEMO_CHECKPOINT)
    dialogue = Dialogue(tokenizer, ChatTemplate(DEMO_CHECKPOINT))
    prompt = dialogue.prompt(MESSAGES)
    assert [tokenizer.is_added(prompt.tokens[position]) for position in prompt.boundaries] == [True] * 4
    assert prompt.tokens == tokenizer.encode(prompt.text)


@pytest.mark.parametrize("name", REPLY)
def test_a_reply_goes_back_into_the_history_as_it_was_written(dialogue_of, bytewise, name):
    """So the next prompt begins with this one and the reply, and costs only what is new."""
    dialogue = dialogue_of(TEMPLATES[name])
    prompt = dialogue.prompt(MESSAGES, TOOLS)
    thought = "hm\n</think>\n\n" if prompt.inside_reasoning else "<think>\nhm\n</think>\n\n"
    message = message_of(replied(dialogue, prompt, thought + REPLY[name], bytewise, TOOLS))
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm"}
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich", "days": 3}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
    following = dialogue.prompt([*MESSAGES, message | {"tool_calls": [call]}, result], TOOLS)
    assert following.text.startswith(prompt.text + thought + REPLY[name] + "<|im_end|>\n")
    assert following.boundaries[:4] == prompt.boundaries


def test_without_tools_a_call_is_text(dialogue_of, bytewise):
    dialogue = dialogue_of(QWEN3)
    prompt = dialogue.prompt(MESSAGES)
    assert message_of(replied(dialogue, prompt, REPLY["qwen3"], bytewise))["content"] == REPLY["qwen3"]


def test_stop_strings_reach_the_reader(dialogue_of, bytewise):
    dialogue = dialogue_of(QWEN3)
    reader = dialogue.reader(dialogue.prompt(MESSAGES), stop=["STOP"])
    text = "".join(piece.text for token in bytewise.encode("one STOP two") for piece in reader.push(token))
    assert (text, reader.stopped, reader.finish()) == ("one ", True, [])


@pytest.mark.parametrize(
    ("template", "boundaries"),
    [
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
            [2],
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", []),  # nothing asks for an answer
        ("{% if add_generation_prompt %}A{% endif %}{{ messages[0].content }}", []),  # the past is no beginning
        ("{% if add_generation_prompt %}<|im_start|>A{% endif %}", []),  # no past at all
        ("<|im_start|>{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>{% endif %}", [2]),
    ],
)
def test_other_templates_have_the_boundaries_they_have(dialogue_of, template, boundaries):
    assert dialogue_of(template).prompt([{"role": "user", "content": "x"}]).boundaries == boundaries


def test_a_past_that_merges_with_the_invitation_has_no_boundary(dialogue_of):
    """NFC makes one letter of the last of the past and the first of the invitation."""
    template = "{{ messages[0].content }}{% if add_generation_prompt %}\u0301x{% endif %}"
    prompt = dialogue_of(template).prompt([{"role": "user", "content": "e"}])
    assert prompt.tokens == list("éx".encode())
    assert prompt.boundaries == []


def test_variables_reach_the_template(dialogue_of):
    dialogue = dialogue_of("{{ kind }}{{ enable_thinking is defined }}")
    assert dialogue.prompt([], kind="a").text == "aFalse"
    assert dialogue.prompt([], thinking=False, kind="a").text == "aTrue"


@pytest.mark.parametrize("name", sorted(OWN_VARIABLES - {"self", "messages", "tools", "thinking", "at_most"}))
def test_what_the_dialogue_sets_is_not_free(dialogue_of, name):
    with pytest.raises(InputError, match="not free") as caught:
        dialogue_of(QWEN3).prompt(MESSAGES, **{name: True})
    assert caught.value.facts["found"] == name


def test_what_the_template_refuses_is_an_input_error(dialogue_of):
    with pytest.raises(InputError, match="does not accept"):
        dialogue_of(QWEN3_5).prompt([])
    with pytest.raises(InputError, match="not UTF-8"):
        dialogue_of(QWEN3).prompt([{"role": "user", "content": "\ud83d"}])


def test_a_message_has_what_was_said():
    def text(kind, text):
        return Piece(kind, text)

    reasoning, content = PieceKind.REASONING, PieceKind.CONTENT
    call = Piece(PieceKind.TOOL_CALL, call=ToolCall("f", '{"a": 1}'))
    assert message_of([]) == {"role": "assistant", "content": ""}
    assert message_of([text(content, "a"), text(content, "b")]) == {"role": "assistant", "content": "ab"}
    thought = message_of([text(reasoning, "h"), text(reasoning, "m")])
    assert thought == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    message = message_of([call, call])
    assert message["content"] is None
    one, two = message["tool_calls"]
    assert one["id"] != two["id"]
    assert one | {"id": ""} == {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
