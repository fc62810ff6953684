"""/v1/completions, by plain HTTP, on a scripted engine."""

import json

import pytest

from support.scripted import says

PATH = "/v1/completions"


def test_a_text_goes_on(ask):
    status, body = ask(PATH, prompt="Once", model="tiny")
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello, world.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 4


def test_sixteen_tokens_unless_told(ask, engine):
    engine.scheduler.script = says("x" * 100)
    assert ask(PATH, prompt="Once")[1]["choices"][0] == {
        "index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length"
    }  # fmt: skip


def test_no_limit(ask, engine):
    engine.scheduler.script = says("x" * 100)
    assert ask(PATH, prompt="Once", max_tokens=-1)[1]["choices"][0]["text"] == "x" * 100


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])],
)
def test_prompts_have_four_forms(ask, engine, prompt, tokens):
    engine.scheduler.script = lambda request: [request.prompt[0], 258]
    _, body = ask(PATH, prompt=prompt)
    assert [list(request.prompt) for request in engine.scheduler.requests] == tokens
    assert [choice["text"] for choice in body["choices"]] == [chr(each[0]) for each in tokens]
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_many_prompts_take_turns(ask, engine):
    engine.scheduler.script = lambda request: [request.prompt[0], 258]
    _, body = ask(PATH, prompt=[[n] for n in range(60, 90)], n=2)
    expected = [chr(n) for n in range(60, 90) for _ in range(2)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(60))
    assert engine.scheduler.most <= 2
    assert body["usage"]["prompt_tokens"] == 30


def test_echo(ask):
    assert ask(PATH, prompt="Once ", echo=True)[1]["choices"][0]["text"] == "Once Hello, world."
    assert ask(PATH, prompt=[79, 107], echo=True, max_tokens=0)[1]["choices"][0] == {
        "index": 0, "text": "Ok", "logprobs": None, "finish_reason": "length"
    }  # fmt: skip


def test_log_probabilities(ask):
    [choice] = ask(PATH, prompt="Once", logprobs=2, max_tokens=2)[1]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["H", "e"],
        "token_logprobs": [-0.72, -1.01],
        "top_logprobs": [{"H": -0.72, "I": -0.73}, {"e": -1.01, "f": -1.02}],
        "text_offset": [0, 1],
    }


def test_a_prompt_is_scored_as_harnesses_ask(ask):
    """What lm-eval reads: the prompt's tokens, the first of which nothing is known, and exactly one token more."""
    [choice] = ask(PATH, prompt="aé", echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1)[1]["choices"]
    assert choice["text"] == "aéH"
    assert choice["logprobs"]["tokens"] == ["a", "\\xc3", "\\xa9", "H"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.95, -1.69, -0.72]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


def test_a_scored_prompt_that_ends_has_its_stop_token(ask, engine):
    engine.scheduler.script = says("")
    [choice] = ask(PATH, prompt="ab", echo=True, logprobs=1, max_tokens=1)[1]["choices"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98, -2.58]


def test_offsets_are_those_of_the_text(ask):
    """Of special tokens, whose names an echo shows, and after a text that was normalised."""
    for prompt in ("<|im_start|>a", [257, 97]):
        [choice] = ask(PATH, prompt=prompt, echo=True, logprobs=0, max_tokens=1)[1]["choices"]
        assert choice["text"] == "<|im_start|>aH"
        assert choice["logprobs"]["text_offset"] == [0, 12, 13]
    [choice] = ask(PATH, prompt="e\u0301", echo=True, logprobs=0, max_tokens=1)[1]["choices"]
    assert choice["text"] == "e\u0301H"
    assert choice["logprobs"]["text_offset"] == [0, 0, 2]


def test_a_prompt_is_scored_once_for_all_choices(ask, engine):
    _, body = ask(PATH, prompt=["ab", "cd"], n=2, echo=True, logprobs=1, max_tokens=1)
    asked = sorted((bytes(request.prompt), request.score_prompt) for request in engine.scheduler.requests)
    assert asked == [(b"ab", False), (b"ab", True), (b"cd", False), (b"cd", True)]
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [[*"abH"], [*"abH"], [*"cdH"], [*"cdH"]]
    assert [choice["logprobs"]["token_logprobs"][1] for choice in body["choices"]] == [-0.98, -0.98, -1.0, -1.0]


def test_the_scores_of_a_prompt_come_in_parts(http):
    body = {"prompt": [97] * 300, "stream": True, "echo": True, "logprobs": 1, "max_tokens": 1}
    with http.stream("POST", PATH, json=body) as answer:
        parts = answer.read().decode().split("\n\n")[:-2]
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert max(len(each["tokens"]) for each in scored) <= 64
    assert [offset for each in scored for offset in each["text_offset"]] == [*range(301)]
    assert "".join(choice["text"] for choice in choices) == "a" * 300 + "H"


def test_the_chosen_token_is_among_the_likeliest(ask):
    assert ask(PATH, prompt="ab", logprobs=0, max_tokens=1)[1]["choices"][0]["logprobs"]["top_logprobs"] == [
        {"H": -0.72}
    ]


def test_a_stream(http, engine):
    engine.scheduler.script = says("Grüße")
    body = {"prompt": "ab", "stream": True, "echo": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    with http.stream("POST", PATH, json=body) as answer:
        parts = answer.read().decode().split("\n\n")
    *chunks, usage = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    assert parts[-2:] == ["data: [DONE]", ""]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abGrüße"
    scored = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(each["tokens"]) for each in scored if each) == 2 + len("Grüße".encode()) + 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["total_tokens"] == 2 + len("Grüße".encode())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": [261]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
        ({"prompt": [[1] * 4000] * 12, "echo": True, "logprobs": 20}, "logprobs"),
    ],
)
def test_what_is_wrong_is_named(ask, asked, param):
    status, body = ask(PATH, **asked)
    assert status == 400
    assert body["error"]["param"] == param
