"""Pieces of grammars in llguidance's variant of Lark, as text. Masks are made of them by mosaic.runtime.grammar."""

import json
from typing import Any

#: Between two tokens of JSON: enough for a line break and the indentation after it, and no room to go on for ever.
SPACE = r"[ \n\r\t]{1,64}"


def quoted(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)


def json_of(schema: Any) -> str:
    """JSON that is valid for a schema."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": SPACE}}
    return f"%json {json.dumps(schema)}"
