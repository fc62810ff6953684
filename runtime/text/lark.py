"""Pieces of grammars in llguidance's variant of Lark, as text. Masks are made of them by mosaic.runtime.grammar."""

import json
from typing import Any

from mosaic.runtime.text.reasoning import CLOSE

#: Between two tokens of JSON: enough for a line break and the indentation after it, and no room to go on for ever.
SPACE = r"[ \n\r\t]{1,64}"
#: Between the end of thinking and the answer.
AFTER_THINKING = r"\n{0,4}"


def reply(body: str, *, thinking: bool) -> str:
    """The rules that a grammar begins with: its body, after the end of thinking if a reply begins inside it."""
    if not thinking:
        return f"start: {body}\n"
    return f"start: thinking /{AFTER_THINKING}/ {body}\nthinking[suffix={quoted(CLOSE)}]: /(?s:.*)/\n"


def quoted(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)


def json_of(schema: Any) -> str:
    """JSON that is valid for a schema."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": SPACE}}
    return f"%json {json.dumps(schema)}"
