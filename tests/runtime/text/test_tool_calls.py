"""Calls of each form, typed by the tools' schemas, and grammars that allow them and nothing else."""

import json

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.text.pieces import PieceKind
from mosaic.runtime.text.tool_calls import ToolCalls, ToolFormat, call_grammar

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["°C", "°F"]},
        "where": {"$ref": "#/$defs/Place"},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "wetter", "description": "W", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


def xml(name, **parameters):
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def json_text(value):
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def calls(tool_format, text, tools=TOOLS):
    reader = ToolCalls(tool_format, tools)
    pieces = reader.push(text) + reader.finish()
    assert all(piece.kind is PieceKind.TOOL_CALL for piece in pieces), pieces
    return [(piece.call.name, json.loads(piece.call.arguments)) for piece in pieces]


def test_xml_values_are_typed_by_the_schema():
    text = xml("wetter", city="7", days="3", unit="°C", where='{"x": 1.5}', exact="True", other="7")
    arguments = {"city": "7", "days": 3, "unit": "°C", "where": {"x": 1.5}, "exact": True, "other": "7"}
    assert calls(ToolFormat.XML, text) == [("wetter", arguments)]


def test_one_newline_on_either_side_is_not_part_of_an_xml_value():
    assert calls(ToolFormat.XML, xml("wetter", city="\n a\n\n")) == [("wetter", {"city": "\n a\n\n"})]
    assert calls(ToolFormat.XML, xml("wetter", city="")) == [("wetter", {"city": ""})]
    text = "<tool_call><function=wetter><parameter=city>Bern</parameter></function></tool_call>"
    assert calls(ToolFormat.XML, text) == [("wetter", {"city": "Bern"})]


def test_an_xml_value_may_mention_all_tags_but_its_own_end():
    value = "<tool_call>\n<function=f>\n<parameter=x>\n</function></tool_call><think></think>"
    assert calls(ToolFormat.XML, xml("wetter", city=value)) == [("wetter", {"city": value})]


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_a_function_that_was_not_offered_is_called_all_the_same(tool_format):
    text = xml("gone", a="1") if tool_format is ToolFormat.XML else json_text({"name": "gone", "arguments": {"a": "1"}})
    assert calls(tool_format, text) == calls(tool_format, text, []) == [("gone", {"a": "1"})]


def test_arguments_are_json_as_people_read_it():
    (piece,) = ToolCalls(ToolFormat.JSON, []).push(json_text({"name": "f", "arguments": {"ö": "世界 👍"}}))
    assert piece.call.arguments == '{"ö": "世界 👍"}'


@pytest.mark.parametrize(
    ("tool_format", "body"),
    [
        (ToolFormat.XML, "<function=f>"),
        (ToolFormat.XML, "<function=></function>"),
        (ToolFormat.XML, "<function=a<b></function>"),
        (ToolFormat.XML, "<function=f><parameter=></parameter></function>"),
        (ToolFormat.XML, "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        (ToolFormat.XML, "<function=f>a</function>"),
        (ToolFormat.XML, "<function=f><parameter=a>1</function>"),
        (ToolFormat.XML, '{"name": "f", "arguments": {}}'),
        (ToolFormat.XML, ""),
        (ToolFormat.JSON, ""),
        (ToolFormat.JSON, "[]"),
        (ToolFormat.JSON, '[{"name": "f", "arguments": {}}]'),
        (ToolFormat.JSON, '{"name": "f"}'),
        (ToolFormat.JSON, '{"name": "", "arguments": {}}'),
        (ToolFormat.JSON, '{"name": 1, "arguments": {}}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": []}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": "{}"}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {}, "arguments": {}}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {}, "more": 1}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {"a": NaN}}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {"a": 1e999}}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {"a": "\\ud83d"}}'),
        (ToolFormat.JSON, '{"name": "\\ud83d", "arguments": {}}'),
        (ToolFormat.JSON, '{"name": "f", "arguments": {"a": "\n"}}'),
        (ToolFormat.JSON, "{'name': 'f', 'arguments': {}}"),
        (ToolFormat.JSON, '{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}"),
        (ToolFormat.JSON, '{"name": "f", "arguments": ' + '{"a": ' * 20_000 + "1" + "}" * 20_001),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_malformed_is_text_as_it_was_written(tool_format, body):
    text = f"a\n\n<tool_call>\n{body}\n</tool_call>\n\nb\n"
    reader = ToolCalls(tool_format, TOOLS)
    pieces = reader.push(text) + reader.finish()
    assert {piece.kind for piece in pieces} == {PieceKind.CONTENT}
    assert "".join(piece.text for piece in pieces) == text


ODD = {"type": "function", "function": {"name": 'f"\\ö\n', "parameters": {"type": "object", "properties": {"ü": {}}}}}


class Grammar:
    """Which texts a grammar allows, with tokens of one byte."""

    def __init__(self, text):
        llguidance = pytest.importorskip("llguidance")
        self.tokenizer = llguidance.LLTokenizer("byte")
        assert llguidance.LLMatcher.validate_grammar(text, self.tokenizer) == ""
        self.matcher = llguidance.LLMatcher(self.tokenizer, text)

    def allows(self, text):
        self.matcher.reset()
        tokens = self.tokenizer.tokenize_str(text)
        return self.matcher.try_consume_tokens(tokens) == len(tokens) and self.matcher.is_accepting()


def test_the_xml_grammar_allows_calls_that_read_back_and_nothing_else():
    grammar = Grammar(call_grammar(TOOLS, ToolFormat.XML))
    whole = xml("wetter", city="Zürich\n<b>", days="3", unit="°F", where='{"x":1}', exact="true")
    short = xml("wetter", city="", days="14")
    now = xml("now")
    for text in (whole, short, now, f"{short}\n{now}\n{whole}"):
        assert grammar.allows(text)
        assert len(calls(ToolFormat.XML, text)) == text.count("<tool_call>")
    assert calls(ToolFormat.XML, whole)[0][1]["where"] == {"x": 1}
    for text in (
        "", "Hello", whole[:-1], f"{now} ", f"Let me see.\n{now}", xml("gone"), xml("now", a="1"), xml("wetter"),
        xml("wetter", city="a", days="15"), xml("wetter", city="a", days="three"), xml("wetter", days="3", city="a"),
        xml("wetter", city="a", days="1", unit="K"), xml("wetter", city="a", days="1", where='{"y":1}'),
    ):  # fmt: skip
        assert not grammar.allows(text), text


def test_the_json_grammar_allows_calls_that_read_back_and_nothing_else():
    grammar = Grammar(call_grammar([*TOOLS, ODD], ToolFormat.JSON))
    whole = json_text({"name": "wetter", "arguments": {"city": '"}', "days": 3, "unit": "°F", "where": {"x": 1.5}}})
    short = json_text({"name": "now", "arguments": {}})
    odd = json_text({"name": 'f"\\ö\n', "arguments": {"ü": None}})
    for text in (whole, short, odd, f"{short}\n{whole}"):
        assert grammar.allows(text)
        assert len(calls(ToolFormat.JSON, text)) == text.count("<tool_call>")
    for text in (
        "", "Hello", short[:-1], f"Now:\n{short}", json_text({"name": "gone", "arguments": {}}),
        json_text({"name": "now", "arguments": {"a": 1}}), json_text({"name": "wetter", "arguments": {"city": "x"}}),
        json_text({"name": "wetter", "arguments": {"city": "x", "days": 15}}),
        json_text({"name": "wetter", "arguments": {"city": "x", "days": 1, "where": {"x": "y"}}}),
    ):  # fmt: skip
        assert not grammar.allows(text), text


@pytest.mark.parametrize("tool_format", ToolFormat)
def test_reasoning_comes_before_calls_where_the_prompt_opened_it(tool_format):
    grammar = Grammar(call_grammar(TOOLS[1:], tool_format, inside_reasoning=True))
    call = xml("now") if tool_format is ToolFormat.XML else json_text({"name": "now", "arguments": {}})
    for thought in ("</think>", "hm < 7\n</think>\n\n", f"{call}</think>\n"):
        assert grammar.allows(thought + call)
    for text in (call, "hm", f"hm</think>x{call}", f"hm</think>{call}x"):
        assert not grammar.allows(text)


def test_a_grammar_of_nothing_is_refused():
    with pytest.raises(InputError, match="no tool"):
        call_grammar([], ToolFormat.JSON)


@pytest.mark.parametrize("name", ["a\nb", "a<b", "a>b"])
def test_names_the_xml_form_cannot_write_are_refused(name):
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    for tool in ({"name": name}, {"name": "f", "parameters": schema}):
        with pytest.raises(InputError, match="cannot be written") as caught:
            call_grammar([{"type": "function", "function": tool}], ToolFormat.XML)
        assert caught.value.facts["found"] == ascii(name)
