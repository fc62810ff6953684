"""Chat templates held against transformers, which all published templates were written for, and against abuse."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from mosaic.format.errors import InputError
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.text.template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate
from mosaic.runtime.text.tool_calls import ToolFormat
from support.templates import QWEN3, QWEN3_5
from support.tiny import write_tokenizer

#: Whitespace as blocks alone on their lines leave it, loop controls, the names of special tokens, the date.
PLAIN = """\
{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}
    {% for message in messages %}
        {% if message.role == 'system' %}
            {% continue %}
        {% endif %}
{{ message.role | upper }}: {{ message['content'] }}{{ eos_token }}{{ pad_token }}
        {% if loop.index >= 5 %}
            {% break %}
        {% endif %}
    {% endfor %}
  {# a comment #}
{{ strftime_now("%Y-%m-%d") }} {{ messages | tojson(indent=2) }} {{ messages[0] | tojson }}
{% if add_generation_prompt %}ASSISTANT:{% endif %}

"""

TEMPLATES = {"qwen3": QWEN3, "qwen3_5": QWEN3_5, "plain": PLAIN}
TEXTS = [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": "Grüße, 世界 👍"}]
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": TEXTS,
    "turns": [
        *TEXTS,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": " and \n then? "},
        {"role": "assistant", "content": "Plain."},
        {"role": "user", "content": ""},
    ],
}
RICH = {
    "calls": (
        "qwen3",
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "which city",
                "tool_calls": [
                    {"type": "function", "function": {"name": "w", "arguments": {"city": "Zürich <b>", "days": [1]}}},
                    {"type": "function", "function": {"name": "v", "arguments": '{"raw": 1}'}},
                ],
            },
            {"role": "tool", "content": "sun"},
            {"role": "tool", "content": "rain"},
        ],
    ),
    "lists": (
        "qwen3_5",
        [
            {"role": "system", "content": [{"type": "text", "text": "S"}]},
            {"role": "user", "content": [{"type": "text", "text": "look "}, {"type": "text", "text": "here"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "x", "b": {"c": 1}}}}],
            },
            {"role": "user", "content": [{"type": "text", "text": "é"}]},
        ],
    ),
}


def template_folder(folder: Path, text: str, **config: object) -> Path:
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_demo_template_renders_as_in_transformers(oracle, name, thinking):
    expected = oracle.apply_chat_template(CONVERSATIONS[name], tokenize=False, add_generation_prompt=True, **thinking)
    assert ChatTemplate(DEMO_CHECKPOINT).render(CONVERSATIONS[name], **thinking) == expected


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_like_the_published_ones_render_as_in_transformers(oracle, tmp_path, template, name, thinking):
    folder = template_folder(tmp_path, TEMPLATES[template], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    expected = oracle.apply_chat_template(
        CONVERSATIONS[name],
        chat_template=TEMPLATES[template],
        tokenize=False,
        add_generation_prompt=True,
        **thinking,
    )
    assert len(expected) > 20
    assert ChatTemplate(folder).render(CONVERSATIONS[name], **thinking) == expected


@pytest.mark.parametrize("case", RICH)
def test_tool_calls_and_content_lists_render_as_in_transformers(oracle, tmp_path, case):
    template, messages = RICH[case]
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True
    )
    rendered = ChatTemplate(template_folder(tmp_path, TEMPLATES[template])).render(messages)
    assert rendered == expected
    assert ("Zürich <b>" if case == "calls" else "look here") in rendered


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("template", ["qwen3", "qwen3_5"])
def test_tools_and_results_render_as_in_transformers(oracle, tmp_path, template, generate):
    """Our messages are the API's; transformers gets what they mean."""
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"c":"Zürich","n":[1]}'}}
    meant = {**call, "function": {"name": "w", "arguments": {"c": "Zürich", "n": [1]}}}
    tools = [{"type": "function", "function": {"name": "w", "description": "<W>", "parameters": {"type": "object"}}}]
    question = [{"type": "text", "text": "Weather "}, {"type": "text", "text": "now?"}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
    messages = [
        *TEXTS,
        {"role": "assistant", "content": "A", "reasoning_content": "old thoughts"},
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "reasoning_content": "new thoughts", "tool_calls": [call, call]},
        result,
        result,
    ]
    meanings = [*messages[:3], {"role": "user", "content": "Weather now?"}, dict(messages[4]), result, result]
    meanings[4] |= {"content": "", "tool_calls": [meant, meant]}
    expected = oracle.apply_chat_template(
        meanings, tools, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=generate
    )
    rendered = ChatTemplate(template_folder(tmp_path, TEMPLATES[template])).render(messages, tools, generate=generate)
    assert rendered == expected
    assert "old thoughts" not in rendered
    assert "new thoughts" in rendered
    assert rendered.endswith("<|im_start|>assistant\n" + "<think>\n" * (template == "qwen3_5")) is generate


@pytest.mark.parametrize(
    ("folder", "reasoning", "tool_format"),
    [("qwen3", True, ToolFormat.JSON), ("qwen3_5", True, ToolFormat.XML), ("plain", False, None)],
)
def test_a_template_tells_what_its_model_writes(tmp_path, folder, reasoning, tool_format):
    template = ChatTemplate(template_folder(tmp_path, TEMPLATES[folder]))
    assert (template.reasoning, template.tool_format) == (reasoning, tool_format)


def test_what_every_template_gets_is_not_up_to_the_caller(tmp_path):
    folder = template_folder(tmp_path, "{{ add_generation_prompt }} {{ x }} {{ eos_token }}", eos_token="</s>")
    rendered = ChatTemplate(folder).render([], add_generation_prompt="no", x=1, eos_token="!")
    assert rendered == "True 1 !"


@pytest.mark.parametrize(
    "arguments",
    [
        "indent=1",
        "ensure_ascii=False",
        "separators=(',', ':')",
        "sort_keys=True",
    ],
)
def test_tojson_takes_the_arguments_it_takes_in_transformers(oracle, tmp_path, arguments):
    text = "{{ messages | tojson(" + arguments + ") }}"
    messages = [{"role": "user", "content": "Grüße"}]
    expected = oracle.apply_chat_template(messages, chat_template=text, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template_folder(tmp_path, text)).render(messages) == expected


def test_generation_marks_are_accepted_as_in_transformers(oracle, tmp_path):
    """{% generation %} tells trainers which tokens are the assistant's; it prints what it holds."""
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    expected = oracle.apply_chat_template(messages, chat_template=text, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template_folder(tmp_path, text)).render(messages) == expected == "Hi"


def test_the_template_file_goes_before_the_config(tmp_path):
    template_folder(tmp_path, "file", chat_template="config")
    assert ChatTemplate(tmp_path).render([]) == "file"
    (tmp_path / TEMPLATE_FILE).unlink()
    assert ChatTemplate(tmp_path).render([]) == "config"


def test_the_template_file_alone_is_enough(tmp_path):
    (tmp_path / TEMPLATE_FILE).write_text("{{ messages | length }}{{ eos_token }}")
    assert ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}]) == "1"


def test_special_tokens_may_be_objects(tmp_path):
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": None}
    folder = template_folder(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", **config)
    assert ChatTemplate(folder).render([]) == "<s>|</s>|False"


def test_the_date_is_today(tmp_path):
    folder = template_folder(tmp_path, "{{ strftime_now('%d %b %Y') }}")
    before, rendered = datetime.now(), ChatTemplate(folder).render([])
    assert rendered in {day.strftime("%d %b %Y") for day in (before, datetime.now())}  # midnight may pass


def test_the_published_layout_of_the_tiny_tokenizer(tmp_path):
    write_tokenizer(tmp_path, 512)
    text = ChatTemplate(tmp_path).render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__name__ }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__')).__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self.__init__.__globals__ }}{{ self.__init__.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages).x }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_out_is_refused(tmp_path, text):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InputError):
        ChatTemplate(template_folder(tmp_path, text)).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_format_shows_no_internals(tmp_path):
    folder = template_folder(tmp_path, "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}")
    try:
        rendered = ChatTemplate(folder).render([])
    except InputError:
        return
    assert "json" not in rendered


def test_no_template_is_refused_with_both_places_named(tmp_path):
    with pytest.raises(InputError, match="no chat template") as caught:
        ChatTemplate(tmp_path)
    assert TEMPLATE_FILE in caught.value.facts["found"]
    assert CONFIG_FILE in caught.value.facts["found"]
    assert "--raw" in caught.value.facts["remedy"]


def test_a_config_without_template_is_refused(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": null}')
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate(tmp_path)


def test_a_broken_config_is_refused(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(InputError, match="not a sound JSON file"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize("text", ["{% if %}", "{{ unclosed", "{% endfor %}", "{{ x | no_such_filter }}"])
def test_a_broken_template_is_refused_with_the_file_named(tmp_path, text):
    with pytest.raises(InputError) as caught:
        ChatTemplate(template_folder(tmp_path, text))
    assert TEMPLATE_FILE in caught.value.facts["file"]


def test_a_template_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError):
        ChatTemplate(tmp_path)


def test_a_raised_exception_is_an_input_error_with_its_message(tmp_path):
    folder = template_folder(tmp_path, QWEN3_5)
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    with pytest.raises(InputError) as caught:
        ChatTemplate(folder).render(messages)
    assert caught.value.facts["found"] == "System message must be at the beginning."
    assert TEMPLATE_FILE in caught.value.facts["file"]


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].no.such }}",  # jinja's own error; the others are Python's
        "{{ 1 + 'a' }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ strftime_now(7) }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_on_the_messages_is_an_input_error(tmp_path, text):
    folder = template_folder(tmp_path, text)
    with pytest.raises(InputError):
        ChatTemplate(folder).render([{"role": "user", "content": "x"}])
