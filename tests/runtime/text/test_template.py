"""Chat templates held against transformers, which all published templates were written for, and against abuse."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from mosaic.format.errors import InputError
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.text.template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate
from support.tiny import write_tokenizer

#: In the style of Qwen3: a namespace that finds the last question, tool calls as JSON, reasoning of old turns dropped.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501 - as published

#: In the style of Qwen3.5: a macro over content lists, raise_exception, |items, thinking by default.
QWEN3_5 = r"""
{%- set image_count = namespace(value=0) %}
{%- macro render_content(content, do_vision_count, is_system_content=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system_content %}
                    {{- raise_exception('System message cannot contain images.') }}
                {%- endif %}
                {%- if do_vision_count %}
                    {%- set image_count.value = image_count.value + 1 %}
                {%- endif %}
                {{- 'Picture ' ~ image_count.value ~ ': ' }}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Unexpected content type.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = render_content(message.content, true, message.role == "system") | trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
        {{- '<|im_start|>system\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\n' }}
                {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- value + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501 - as published

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
