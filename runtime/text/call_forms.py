"""How tool calls are written, as generators that say what must come next, and what follows them through a growing text.

A form yields the literals it can go on with and what may stand before them, and is sent what stood there. So text that
cannot become a call is known as such at its first wrong character, and nothing is read twice.
"""

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mosaic.runtime.text.pieces import ToolCall
from mosaic.runtime.text.search import Search
from mosaic.runtime.text.values import parameters, parse_json, typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARAMETER_END = "</parameter>"
TAG_NAME = re.compile(r"[^<>\n]*")

_BLANK = re.compile(r"[ \t\r\n]*")
_ANYTHING = re.compile(r".*", re.DOTALL)
_JSON_OUTSIDE_STRINGS = re.compile(r"[-+.,:\w\s\[\]]*")


@dataclass(frozen=True)
class Expected:
    """One of some literals, after text of which every character matches `between`."""

    literals: tuple[str, ...]
    between: re.Pattern[str]


class Element(NamedTuple):
    """What came: the text between, and the literal after it."""

    text: str
    literal: str


class NotACallError(Exception):
    """The text is well formed so far, but stands for no call."""


Form = Generator[Expected, Element, ToolCall]


def xml_form(schemas: Mapping[str, Mapping[str, Any]]) -> Form:
    """Qwen3.5 and later: <function=NAME>, then <parameter=NAME>, a value on lines of its own, </parameter> for each."""
    yield Expected(("<function=",), _BLANK)
    name = (yield Expected((">",), TAG_NAME)).text
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while (yield Expected(("<parameter=", "</function>"), _BLANK)).literal == "<parameter=":
        key = (yield Expected((">",), TAG_NAME)).text
        value = (yield Expected((PARAMETER_END,), _ANYTHING)).text
        if not key or key in arguments:
            raise NotACallError
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed(value, parameters(schema).get(key), schema)
    call = _call(name, arguments)
    yield Expected((CLOSE,), _BLANK)
    return call


def json_form() -> Form:
    """Qwen3 and Qwen3-Next: {"name": NAME, "arguments": {...}}."""
    parts = [*(yield Expected(("{",), _BLANK))]
    depth = 1
    while depth:
        parts += yield Expected(('"', "{", "}"), _JSON_OUTSIDE_STRINGS)
        if parts[-1] == '"':
            while True:
                parts += yield Expected(('"', r"\"", r"\\"), _ANYTHING)
                if parts[-1] == '"':
                    break
        else:
            depth += 1 if parts[-1] == "{" else -1
    try:
        value = parse_json("".join(parts))
    except ValueError as error:
        raise NotACallError from error
    if value.keys() != {"name", "arguments"}:
        raise NotACallError
    call = _call(value["name"], value["arguments"])
    yield Expected((CLOSE,), _BLANK)
    return call


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NotACallError
    try:
        call = ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        f"{call.name}{call.arguments}".encode()
    except (UnicodeEncodeError, RecursionError) as error:  # an escape can stand for half a character, which is no text
        raise NotACallError from error
    return call


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: with a call, or with text that is none; and the text after it, not looked at yet."""

    call: ToolCall | None
    text: str
    after: str


class Attempt:
    """Follows a form through the text after an opening tag."""

    def __init__(self, opening: str, form: Form) -> None:
        self._elements = [opening]  # whole ones, as written
        self._between: list[str] = []  # of the element that is being read
        self._form = form
        self._expect(next(form))

    def push(self, text: str) -> Outcome | None:
        """Further text; None while all of it may be part of a call."""
        while text:
            before, found, text = self._search.push(text)
            self._between.append(before)
            if not self._expected.between.fullmatch(before):
                text = "".join(self._between) + (self._search.finish() if found is None else found + text)
                return Outcome(None, "".join(self._elements), text)
            if found is None:
                continue
            element = Element("".join(self._between), found)
            self._elements += element
            self._between = []
            try:
                self._expect(self._form.send(element))
            except StopIteration as end:
                return Outcome(end.value, "", text)
            except NotACallError:
                return Outcome(None, "".join(self._elements), text)
        return None

    def finish(self) -> str:
        """All of the text as it was written, when no more comes."""
        return "".join([*self._elements, *self._between, self._search.finish()])

    def _expect(self, expected: Expected) -> None:
        self._expected = expected
        self._search = Search(expected.literals)
