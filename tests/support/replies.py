"""What a reply says, found in its whole text at once: the oracle for the reader that sees it token by token.

Written with regular expressions over the finished text, without any of the reader's code. A reply comes out as a list
of ("reasoning" | "content", text) and ("call", name, arguments), neighbours of one kind joined.
"""

import json
import re

from mosaic.runtime.tokenizer import Tokenizer

BLANK = r"[ \t\r\n]*"
FUNCTION = re.compile(rf"{BLANK}<function=([^<>\n]*)>")
PARAMETER = re.compile(rf"{BLANK}<parameter=([^<>\n]*)>")
END_FUNCTION = re.compile(rf"{BLANK}</function>")
END_CALL = re.compile(rf"{BLANK}</tool_call>")
OBJECT = re.compile(rf"{BLANK}\{{")
JSON_ITEM = re.compile(r'[-+.,:\w\s\[\]]*(?:("(?:\\.|[^"\\])*")|([{}]))', re.DOTALL)
UNFINISHED_ITEM = re.compile(r'[-+.,:\w\s\[\]]*("(\\.|[^"\\])*\\?)?', re.DOTALL)


class Chunks(Tokenizer):
    """A tokenizer for one text: token n stands for the n-th of some byte strings."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks

    def token_bytes(self, number: int) -> bytes:
        return self.chunks[number]


def before_stop(text, stop):
    """The text before the stop string that ends first; of those, before the longest. And whether there is one."""
    ends = [(i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i)]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def reply(text, *, inside=False, reasoning=False, calls=None, schemas=None):
    """`calls`: "xml", "json" or None. `schemas`: function -> parameter -> the one type it has."""
    pieces = []
    for kind, part in parted(text, inside) if reasoning or inside else [("content", text)]:
        if kind == "content" and calls:
            pieces += with_calls(part, calls, schemas or {})
        else:
            pieces.append((kind, part))
    return joined(pieces)


def joined(pieces):
    result = []
    for piece in pieces:
        if piece[0] != "call" and result and result[-1][0] == piece[0]:
            result[-1] = (piece[0], result[-1][1] + piece[1])
        elif piece[0] == "call" or piece[1]:
            result.append(piece)
    return result


def parted(text, inside):
    """Reasoning and content."""
    pieces, kind, after_tag = [], "reasoning" if inside else "content", inside
    while True:
        if opening := re.match(r"\n*<think>", text):
            text, kind, after_tag = text[opening.end() :], "reasoning", True
            continue
        if after_tag:
            text = text.lstrip("\n")
        if kind == "content" or "</think>" not in text:
            return [*pieces, (kind, text)]
        thought, _, text = text.partition("</think>")
        pieces.append((kind, thought.rstrip("\n")))
        kind, after_tag = "content", True


def with_calls(text, form, schemas):
    pieces, start, position, after_call = [], 0, 0, False
    while (tag := text.find("<tool_call>", position)) >= 0:
        call, position = (xml_call if form == "xml" else json_call)(text, tag + len("<tool_call>"), schemas)
        if call:
            pieces.append(("content", stripped(text[start:tag], after_call, True)))
            pieces.append(("call", *call))
            start, after_call = position, True
    return [*pieces, ("content", stripped(text[start:], after_call, False))]


def stripped(text, after_call, before_call):
    text = text.lstrip("\n") if after_call else text
    return text.rstrip("\n") if before_call else text


def xml_call(text, position, schemas):
    """((name, arguments) or None, where to read on)."""
    head = FUNCTION.match(text, position)
    if not head:
        return None, position
    position, arguments = head.end(), {}
    while parameter := PARAMETER.match(text, position):
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return None, len(text)
        value = re.sub(r"\A\n|\n\Z", "", text[parameter.end() : end])
        position = end + len("</parameter>")
        if not parameter[1] or parameter[1] in arguments:
            return None, position
        arguments[parameter[1]] = as_type(value, schemas.get(head[1], {}).get(parameter[1], "string"))
    if not (end := END_FUNCTION.match(text, position)) or not head[1]:
        return None, end.end() if end else position
    close = END_CALL.match(text, end.end())
    return ((head[1], arguments), close.end()) if close else (None, end.end())


def as_type(value, name):
    if name == "string":
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, {"integer": int, "object": dict}[name]) else value


def json_call(text, position, schemas):
    opening = OBJECT.match(text, position)
    if not opening:
        return None, position
    start, position, depth = opening.end() - 1, opening.end(), 1
    while depth:
        item = JSON_ITEM.match(text, position)
        if not item:
            return None, len(text) if UNFINISHED_ITEM.fullmatch(text, position) else position
        position = item.end()
        depth += {"{": 1, "}": -1}.get(item[2], 0)
    try:
        value = json.loads(text[start:position])
        name, arguments = value["name"], value["arguments"]
    except (ValueError, KeyError):
        return None, position
    if len(value) != 2 or not name or type(name) is not str or type(arguments) is not dict:
        return None, position
    close = END_CALL.match(text, position)
    return ((name, arguments), close.end()) if close else (None, position)
