"""One text, every way out: both endpoints, whole and streamed, and the terminal say the same, whatever is in it.

The scripted engine's tokens are bytes, so characters, tags and stop strings are cut at every place they can be.
"""

import io
import json
import random

import pytest

from mosaic.runtime.engine import Engine
from mosaic.runtime.terminal.display import Display
from support.scripted import says

ALPHABET = ["a", "b", "ab", "👩‍👩‍👧", "🇩🇪", "你好", "e\u0301", "ü", "\n", " ", "</", "<think", "STOP", "ST", "\ufffd"]
STOPS = [["STOP"], ["ab", "aba"], ["🇩🇪"], ["👩‍👧", "你"], ["\n\n"], ["e\u0301"], ["no such text"], ["a b", " a", "STO"]]


def cases(count: int) -> list[tuple[str, list[str]]]:
    chosen = random.Random(7)
    return [
        ("x" + "".join(chosen.choices(ALPHABET, k=chosen.randint(1, 25))), chosen.choice(STOPS)) for _ in range(count)
    ]


def cut(text: str, stop: list[str]) -> str:
    """Up to the stop string that is complete first; of those complete at once, the longest counts."""
    ends = [(text.index(each) + len(each), text.index(each)) for each in stop if each in text]
    return text[: min(ends)[1]] if ends else text


def streamed(http, path: str, body: dict) -> list[dict]:
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize(("text", "stop"), cases(40))
def test_every_way_out_says_the_same(http, engine, text, stop):
    engine.scheduler.script = says(text)
    expected, ended = cut(text, stop), "stop"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stop": stop}
    completion = {"prompt": "Hi", "stop": stop, "max_tokens": 1000}

    whole = http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (expected, ended)
    parts = streamed(http, "/v1/chat/completions", chat)
    assert "".join(part["delta"].get("content", "") for part in parts) == expected
    assert parts[-1]["finish_reason"] == ended

    whole = http.post("/v1/completions", json=completion).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (expected, ended)
    parts = streamed(http, "/v1/completions", completion)
    assert "".join(part["text"] for part in parts) == expected
    assert parts[-1]["finish_reason"] == ended

    said = io.StringIO()
    display = Display(said, None)
    for number, piece in enumerate(Engine.answering(engine, chat["messages"], stop=stop)):
        display.show(piece, number)
    display.end()
    assert said.getvalue() == expected + "\n"
