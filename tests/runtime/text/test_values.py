"""Arguments typed by a schema, and JSON without loopholes."""

import json

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.text.values import functions, parse_json, typed, types_of

ROOT = {
    "$defs": {
        "Count": {"type": "integer"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]},
        "Many": {"anyOf": [{"$ref": "#/$defs/Many"}] * 100 + [{"type": "array"}]},
    }
}
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}

#: schema, text, value
CASES = [
    (STRING, "7", "7"),
    (STRING, ' "quoted" ', ' "quoted" '),
    (STRING, "null", "null"),
    ({}, "7", "7"),
    (None, "7", "7"),
    (True, "7", "7"),
    (INTEGER, "7", 7),
    (INTEGER, "\n-7 ", -7),
    (INTEGER, "seven", "seven"),
    (INTEGER, '"7"', '"7"'),
    (INTEGER, "[7]", "[7]"),
    (INTEGER, "1e400", "1e400"),
    (INTEGER, "1" * 5000, "1" * 5000),
    (INTEGER, "", ""),
    (NUMBER, "7", 7),
    (NUMBER, "-2.5e3", -2500.0),
    (NUMBER, "NaN", "NaN"),
    (NUMBER, "true", "true"),
    (BOOLEAN, "true", True),
    (BOOLEAN, "False", False),
    (BOOLEAN, "1", "1"),
    ({"type": "null"}, "None", None),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "array"}, "[1,", "[1,"),
    ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
    ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
    ({"type": "object"}, "[" * 100_000, "[" * 100_000),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["integer", "null"]}, "3", 3),
    ({"type": ["string", "integer"]}, "3", "3"),
    (OPTIONAL, "null", None),
    (OPTIONAL, "nullable", "nullable"),
    ({"oneOf": [INTEGER, BOOLEAN]}, "TRUE", True),
    ({"enum": [1, 2.5, None]}, "1", 1),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": {"a": 1}}, '{"a": 1}', {"a": 1}),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/Count"}]}, "5", 5),
    ({"$ref": "#/$defs/Loop"}, "null", None),
    ({"$ref": "#/$defs/Many"}, "[]", []),
    ({"$ref": "#/$defs/None"}, "5", "5"),
    ({"$ref": "https://example.org/schema"}, "5", "5"),
    ({"type": 5, "enum": 7, "anyOf": "x"}, "5", "5"),
]


@pytest.mark.parametrize(("schema", "text", "value"), CASES, ids=lambda value: str(value)[:40])
def test_a_value_is_of_a_type_the_schema_names_or_the_text_itself(schema, text, value):
    found = typed(text, schema, ROOT)
    assert (found, type(found)) == (value, type(value))


def test_every_type_of_json_is_named():
    for value in (None, True, 1, 1.5, "x", [], {}):
        (name,) = types_of({"const": value}, {})
        assert typed(json.dumps(value), {"type": name}, {}) == (value if value != "x" else '"x"')


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", '{"a":1,"a":1}', "[" * 100_000, "{} {}", "", "'a'", '"\n"']
)
def test_what_only_looks_like_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_functions_are_known_by_name():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bare = {"type": "function", "function": {"name": "g"}}
    assert functions([tool, bare]) == {"f": {"type": "object"}, "g": {}}


@pytest.mark.parametrize(
    "tool",
    [
        None,
        "f",
        {},
        {"function": None},
        {"function": {}},
        {"function": {"name": 1}},
        {"function": {"name": ""}},
        {"function": {"name": "f", "parameters": []}},
    ],
    ids=str,
)
def test_what_is_not_a_tool_is_refused(tool):
    with pytest.raises(InputError, match="not a tool"):
        functions([tool])
