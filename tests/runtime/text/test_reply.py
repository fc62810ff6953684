"""Replies read token by token, held against an oracle that has the whole text, whatever the tokens' boundaries."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.text import call_forms
from mosaic.runtime.text.reply import Piece, ReplyReader
from mosaic.runtime.text.search import Search
from mosaic.runtime.text.tool_calls import ToolFormat
from mosaic.runtime.tokenizer import Tokenizer
from support import replies
from support.replies import Chunks
from support.tiny_tokenizer import END_THINK, IM_START, THINK

PROPERTIES = {"s": "string", "n": "integer", "o": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {name: {"type": t} for name, t in PROPERTIES.items()}},
        },
    }
]
XML = (
    "<tool_call>\n<function=f>\n<parameter=s>\na < b\n</parameter>\n"
    "<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
)
JSON = '<tool_call>\n{"name": "f", "arguments": {"s": "}\\"</tool_call>\\\\", "o": {"é": [1, {}]}}}\n</tool_call>'

WORDS = [
    "a",
    "b",
    " ",
    "\n",
    "\n\n",
    "é",
    "世界",
    "👨‍👩‍👧‍👦",
    "🇩🇪🇫🇷",
    "👍🏽",
    "e\u0301\u0327",
    "नमस्ते",
    "\ufffd",
    "<",
    ">",
    "x" * 9,
]
THINK_PARTS = ["<think>", "</think>", "<think>\n\n</think>\n\n", "<thi", "nk>", "</", "think>"]
XML_PARTS = [
    XML, "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=s>", "<parameter=n>",
    "<parameter=o>", "<parameter=>", "</parameter>", "5", '{"k": 1}', "<tool_call>\n<function=f>\n<parameter=s>\n",
    "\n</parameter>\n</function>\n</tool_call>", "<tool_", "<para",
]  # fmt: skip
JSON_PARTS = [
    JSON, "<tool_call>", "</tool_call>", "{", "}", '"', "\\", '{"name": "f", ', '"arguments": {}}', '"arguments": {',
    ":", "!", "1", '{"name": "g", "arguments": {"x": ', "[", "]", ",", '"k": ', '<tool_call>{"name": "',
    '"}}\n</tool_call>',
]  # fmt: skip
STOPS = [
    "a",
    "ab",
    "aab",
    "\n\n",
    "世",
    "👧",
    "\u0301",
    "</think>",
    "<tool_call>",
    "think>\nx",
    "\ufffd",
    "5\n</",
    '"k"',
]
FORMS = {None: [], "xml": XML_PARTS, "json": JSON_PARTS}


def chunked(data: bytes, cuts) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def as_tuples(pieces: list[Piece]) -> list[tuple]:
    """In the oracle's form. Arguments are compared as values: the spelling of JSON is not what was said."""
    return replies.joined(
        ("call", piece.call.name, json.loads(piece.call.arguments)) if piece.call else (piece.kind.value, piece.text)
        for piece in pieces
    )


def read(chunks: list[bytes], **options) -> tuple[list[tuple], bool]:
    reader = ReplyReader(Chunks(chunks), tools=TOOLS, **options)
    pieces = []
    for number in range(len(chunks)):
        assert not (reader.stopped and reader.push(number))
        pieces += reader.push(number)
    pieces += reader.finish()
    assert reader.finish() == []
    assert all(piece.text or piece.call for piece in pieces)
    return as_tuples(pieces), reader.stopped


def check(data: bytes, chunks: list[bytes], stop, inside, reasoning, form):
    text, stopped = replies.before_stop(data.decode(errors="replace"), stop)
    expected = replies.reply(text, inside=inside, reasoning=reasoning, calls=form, schemas={"f": PROPERTIES})
    tool_format = form and ToolFormat(form)
    found = read(chunks, stop=stop, inside_reasoning=inside, reasoning=reasoning, tool_format=tool_format)
    assert found == (expected, stopped)


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.lists(st.sampled_from(STOPS), max_size=3, unique=True))
def test_any_text_divided_anywhere_says_what_the_whole_text_says(form, data, inside, reasoning, stop):
    parts = data.draw(st.lists(st.sampled_from(WORDS + THINK_PARTS + 2 * FORMS[form]), max_size=16))
    raw = "".join(parts).encode()
    if data.draw(st.booleans()):  # bytes that are no text
        place = data.draw(st.integers(0, len(raw)))
        raw = (
            raw[:place]
            + data.draw(st.sampled_from([b"\xff", b"\xe2\x82", b"\xf0\x9f\x91", b"\x80", b"\xed\xa0\x80"]))
            + raw[place:]
        )
    chunks = chunked(raw, data.draw(st.lists(st.integers(0, 400), max_size=30)))
    check(raw, chunks, stop, inside, reasoning, form)


#: Whole replies: every division into two tokens, and into single bytes.
REPLIES = {
    "emoji": ("👨‍👩‍👧‍👦🇩🇪🇫🇷👍🏽", {}),
    "marks": ("e\u0301\u0327 नमस्ते 世界！", {"stop": ["世界"]}),
    "opened by the prompt": ("\nhm\n\n</think>\n\nYes.\n", {"inside": True}),
    "opened again": ("<think>\nhm\n</think>\n\nYes.", {"inside": True}),
    "opened by the model": ("\n<think>\nhm\n</think>\n\nYes.", {}),
    "empty block": ("<think>\n\n</think>\n\nYes.", {}),
    "two blocks": ("<think>a</think>\n<think>b</think>\nYes.", {}),
    "nested": ("<think>a<think>b</think>c</think>d", {}),
    "never closed": ("<think>\nhm\n</thin", {}),
    "closing without opening": ("Yes.\n</think>\n\nNo.", {}),
    "mentioned": ("The tag <think> opens, </think> closes.", {}),
    "newlines only": ("\n\n\n", {}),
    "stop in reasoning": ("hm STOP </think>Yes", {"inside": True, "stop": ["STOP"]}),
    "stop is a tag": ("hm\n</think>Yes", {"inside": True, "stop": ["\n</think>"]}),
    "stop over a tag": ("hm</think>\n\nYes", {"inside": True, "stop": ["k>\n\nY"]}),
    "xml": (f"Let me see.\n\n{XML}\n{XML}\nDone.", {"form": "xml"}),
    "json": (f"Let me see.\n\n{JSON}\n{JSON}\nDone.", {"form": "json"}),
    "after reasoning": (f"hm\n</think>\n\n{XML}", {"inside": True, "form": "xml"}),
    "in reasoning": (f"hm {XML} hm</think>{XML}", {"inside": True, "form": "xml"}),
    "stop in a call": (f"a\n{XML}", {"form": "xml", "stop": ["7\n</"]}),
    "no call": ("\n<tool_call>\n\nis a tag.", {"form": "xml"}),
    "call after no call": (f"<tool_call>\n{XML}", {"form": "xml"}),
    "no JSON": (f'a\n<tool_call>\n{{"name": "f", "arguments": {{}}\n</tool_call>\n{JSON}', {"form": "json"}),
    "call cut off": (XML[:-3], {"form": "xml"}),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_divided_at_every_byte(name):
    text, options = REPLIES[name]
    options = {"stop": [], "inside": False, "reasoning": True, "form": None} | options
    data = text.encode()
    check(data, [data[i : i + 1] for i in range(len(data))], **options)
    for cut in range(len(data) + 1):
        check(data, [data[:cut], data[cut:]], **options)


def said(text: str, **options) -> list[tuple]:
    return read([text.encode()], **{"reasoning": True, **options})[0]


def test_what_replies_say():
    """The oracle's own anchor: some replies written out."""
    call = ("call", "f", {"s": "a < b", "n": 7})
    assert said("\nhm\n\n</think>\n\nYes.\n", inside_reasoning=True) == [("reasoning", "hm"), ("content", "Yes.\n")]
    assert said("<think>\n\n</think>\n\nYes.") == [("content", "Yes.")]
    assert said("<think>\nhm\n</thin") == [("reasoning", "hm\n</thin")]
    assert said("Yes.</think>No") == [("content", "Yes.</think>No")]
    assert said(f"See:\n\n{XML}\n{XML}\nDone.", tool_format=ToolFormat.XML) == [
        ("content", "See:"), call, call, ("content", "Done.")
    ]  # fmt: skip
    assert said(JSON, tool_format=ToolFormat.JSON) == [
        ("call", "f", {"s": '}"</tool_call>\\', "o": {"é": [1, {}]}})
    ]  # fmt: skip
    assert said(XML) == [("content", XML)]
    assert said("<think>a</think>b", reasoning=False) == [("content", "<think>a</think>b")]


def current(text: str, inside: bool, reasoning: bool) -> list[tuple]:
    """What must be out once this much of a text is there: all that no continuation can change."""
    if not (inside or reasoning):
        return replies.joined([("content", text)])
    (*earlier, (kind, last)) = replies.parted(text, inside)
    if "<think>".startswith(last.lstrip("\n")):
        last = ""
    elif kind == "reasoning":
        held = max(n for n in range(len("</think>")) if last.endswith("</think>"[:n]))
        last = last[: len(last) - held].rstrip("\n")
    return replies.joined([*earlier, (kind, last)])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*WORDS, *THINK_PARTS]), max_size=12),
    st.lists(st.integers(0, 200), max_size=20),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["a", "aab", "\n\n", "世a"]), max_size=2),
)
def test_nothing_is_held_but_the_beginning_of_a_tag_or_a_stop_string(parts, cuts, inside, reasoning, stop):
    data = "".join(parts).encode()
    chunks = chunked(data, cuts)
    reader = ReplyReader(Chunks(chunks), stop=stop, inside_reasoning=inside, reasoning=reasoning)
    out, seen = [], b""
    for number, chunk in enumerate(chunks):
        out += reader.push(number)
        seen += chunk
        if reader.stopped:
            return
        text = seen.decode(errors="ignore")
        held = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert as_tuples(out) == current(text[: len(text) - held], inside, reasoning)


@pytest.mark.parametrize(
    ("form", "opening", "last"),
    [
        (ToolFormat.XML, "<tool_call", "s"),
        (ToolFormat.XML, "<tool_call>\n", "T"),
        (ToolFormat.XML, "<tool_call>\n<func", "y"),
        (ToolFormat.XML, "<tool_call>\n<function=f", "<"),
        (ToolFormat.XML, "<tool_call>\n<function=f>\n", "x"),
        (ToolFormat.XML, "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>", "."),
        (ToolFormat.XML, "<tool_call>\n<function=f>\n</function>\n", "!"),
        (ToolFormat.JSON, "<tool_call> ", "<"),
        (ToolFormat.JSON, "<tool_call>{", "'"),
        (ToolFormat.JSON, '<tool_call>{"a" ', "("),
        (ToolFormat.JSON, '<tool_call>{"a": {}', "}"),  # whole, and no call
        (ToolFormat.JSON, '<tool_call>{"name": "f", "arguments": {}}\n', "!"),
    ],
    ids=str,
)
def test_what_cannot_become_a_call_is_let_go_at_its_first_wrong_character(form, opening, last):
    reader = ReplyReader(Chunks([opening.encode(), last.encode(), b" "]), tool_format=form, tools=TOOLS)
    assert reader.push(0) == []
    text = "".join(piece.text for piece in reader.push(1))
    assert text + ("<" if last == "<" else "") == opening + last  # "<" may begin another call


@pytest.mark.parametrize("name", REPLIES)
def test_special_tokens_between_the_bytes_say_nothing(bytewise, name):
    """And a tag says the same as one token and letter by letter."""
    text, options = REPLIES[name]
    form = options.get("form")
    choice = {
        "stop": options.get("stop", []),
        "inside_reasoning": options.get("inside", False),
        "reasoning": True,
        "tool_format": form and ToolFormat(form),
    }
    whole = bytewise.encode(text)
    assert ("<think>" in text) == (THINK in whole)
    assert ("</think>" in text) == (END_THINK in whole)
    text = bytewise.decode(whole)  # which NFC may have changed
    letters = [token for byte in text.encode() for token in (byte, IM_START)]
    results = []
    for tokens in (whole, letters):
        reader = ReplyReader(bytewise, tools=TOOLS, **choice)
        results.append(as_tuples([piece for token in tokens for piece in reader.push(token)] + reader.finish()))
    assert results[0] == results[1]
    assert results[0] == read([text.encode()], **choice)[0]


@pytest.mark.parametrize("name", REPLIES)
def test_the_tokens_of_a_real_vocabulary(name):
    tokenizer = Tokenizer(DEMO_CHECKPOINT)
    text, options = REPLIES[name]
    tokens = tokenizer.encode(text)
    stop, form = options.get("stop", []), options.get("form")
    reader = ReplyReader(
        tokenizer,
        stop=stop,
        inside_reasoning=options.get("inside", False),
        reasoning=True,
        tool_format=form and ToolFormat(form),
        tools=TOOLS,
    )
    found = as_tuples([piece for token in tokens for piece in reader.push(token)] + reader.finish())
    text, _ = replies.before_stop(tokenizer.decode(tokens), stop)  # which NFC may have changed
    assert found == replies.reply(
        text, inside=options.get("inside", False), reasoning=True, calls=form, schemas={"f": PROPERTIES}
    )


ENDLESS = {
    "text": "word " * 4000,
    "newlines": "\n" * 20000,
    "reasoning": "<think>" + "hm\n" * 6000,
    "xml value": "<tool_call>\n<function=f>\n<parameter=s>\n" + "x</para\n" * 3000,
    "xml calls in a value": "<tool_call>\n<function=f>\n<parameter=s>\n" * 600,
    "xml names": "<tool_call>\n<function=f" * 1000,
    "broken in a row": "<tool_call>\n<function=f>\n<parameter=s>\n" * 300 + "</parameter>!" * 300,
    "json": '<tool_call>\n{"name": "f", "arguments": {"s": "' + 'a\\"b' * 5000,
    "json calls in a string": '<tool_call>{"' * 1500,
    "json objects": '<tool_call>{"a":' * 1200,
    "closing tags": "<tool_call>{" + "</tool_call>" * 1500,
}


@pytest.mark.parametrize("coarse", [1, 7, 10**6])
@pytest.mark.parametrize("name", ENDLESS)
def test_work_grows_with_the_text_and_not_faster(monkeypatch, name, coarse):
    """Characters are counted that enter a search, and JSON texts that are parsed."""
    counted = {"searched": 0, "parsed": 0}
    push, parse = Search.push, call_forms.parse_json

    def counting_push(self, text):
        part = push(self, text)
        counted["searched"] += len(text) - len(part.after)
        return part

    def counting_parse(text):
        counted["parsed"] += len(text)
        return parse(text)

    monkeypatch.setattr(Search, "push", counting_push)
    monkeypatch.setattr(call_forms, "parse_json", counting_parse)
    data = ENDLESS[name].encode()
    chunks = [data[i : i + coarse] for i in range(0, len(data), coarse)]
    form = ToolFormat.JSON if "json" in name or "{" in ENDLESS[name] else ToolFormat.XML
    found, _ = read(chunks, stop=["\n\n\n!", "aaab"], reasoning=True, tool_format=form)
    assert "".join(text for _, text in found).endswith(ENDLESS[name][-5:])
    assert counted["searched"] <= 8 * len(data)
    assert counted["parsed"] <= len(data)
