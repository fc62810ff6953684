"""Tool calls in the content of a reply: found while it grows, and the grammar for replies that must be calls.

What is not a whole, well-formed call stays text. A call to a function that was not offered is a call: whoever offered
the functions knows best what to answer. Newlines that touch a call are not part of the content.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from mosaic.format.errors import InputError
from mosaic.runtime.text.call_forms import CLOSE, OPEN, PARAMETER_END, TAG_NAME, Attempt, Form, json_form, xml_form
from mosaic.runtime.text.lark import json_of, quoted, reply
from mosaic.runtime.text.pieces import Piece, PieceKind
from mosaic.runtime.text.search import TagSearch
from mosaic.runtime.text.values import functions, parameters, types_of


class ToolFormat(StrEnum):
    """How a family of models writes calls between <tool_call> and </tool_call>."""

    XML = "xml"  # Qwen3.5 and later
    JSON = "json"  # Qwen3, Qwen3-Next


class ToolCalls:
    """Splits content into text and calls. `tools`, in the API's form, type the values of XML calls."""

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        self._format = tool_format
        self._schemas = functions(tools)
        self._tag = TagSearch(OPEN)
        self._attempt: Attempt | None = None

    def push(self, text: str) -> list[Piece]:
        """The pieces that further text completes. A call comes whole, with its closing tag."""
        pieces: list[Piece] = []
        while text:
            if self._attempt is None:
                before, found, text = self._tag.push(text)
                if before:
                    pieces.append(Piece(PieceKind.CONTENT, before))
                if found is not None:
                    self._attempt = Attempt(found, self._form())
                continue
            outcome = self._attempt.push(text)
            if outcome is None:
                break
            self._attempt = None
            text = outcome.after
            if outcome.call is not None:
                pieces.append(Piece(PieceKind.TOOL_CALL, call=outcome.call))
                self._tag = TagSearch(OPEN, after_tag=True)
            else:
                pieces.append(Piece(PieceKind.CONTENT, outcome.text))
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back as the beginning of a call that never ended."""
        held = self._attempt.finish() if self._attempt else self._tag.finish()
        self._attempt = None
        return [Piece(PieceKind.CONTENT, held)] if held else []

    def _form(self) -> Form:
        return xml_form(self._schemas) if self._format is ToolFormat.XML else json_form()


def call_grammar(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat, *, inside_reasoning: bool = False) -> str:
    """The replies that are calls of these tools, one or more, and nothing else: a grammar in llguidance's Lark.

    `inside_reasoning`: the prompt opened it, so it comes first. Optional parameters may be left out; in the XML form
    all come in the order of the schema. Schemas are not checked here: llguidance knows what it can do.
    """
    schemas = functions(tools)
    if not schemas:
        raise InputError("there is no tool to call", found="no tools", expected="one or more", remedy="offer tools")
    body = _xml_body if tool_format is ToolFormat.XML else _json_body
    calls = [" ".join([quoted(OPEN), *body(name, schema), quoted(CLOSE)]) for name, schema in schemas.items()]
    start = reply('call ("\\n" call)*', thinking=inside_reasoning)
    return f"{start}call: {' | '.join(calls)}\ntext[suffix={quoted(PARAMETER_END)}]: /(?s:.*)/\n"


def _json_body(name: str, schema: Mapping[str, Any]) -> list[str]:
    head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    arguments = {**schema, "type": "object"} if schema else {"type": "object", "additionalProperties": False}
    return [quoted(head), json_of(arguments), quoted("}\n")]


def _xml_body(name: str, schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    body = [quoted(f"\n<function={_tag_name(name)}>\n")]
    for key, value in parameters(schema).items():
        parameter = " ".join([quoted(f"<parameter={_tag_name(key)}>\n"), *_xml_value(value, schema), quoted("\n")])
        body.append(parameter if isinstance(required, list) and key in required else f"({parameter})?")
    return [*body, quoted("</function>\n")]


def _xml_value(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """What stands between a parameter's tags, and the tag after it."""
    end = quoted(f"\n{PARAMETER_END}")
    types = types_of(schema, root)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return [json_of({**definitions, **schema}), end]
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return [f"({' | '.join(map(quoted, choices))})", end]
    return ["text"]


def _tag_name(name: str) -> str:
    """A name that can stand in a tag of the XML form, which knows no escapes."""
    if not name or not TAG_NAME.fullmatch(name):
        raise InputError(
            "a name cannot be written in this model's tool calls",
            found=ascii(name),
            expected="a name without <, > and line breaks",
            remedy="rename it",
        )
    return name
