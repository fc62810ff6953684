"""/v1/chat/completions, by plain HTTP, on a scripted engine."""

import json

import httpx
import pytest

from support.scripted import ScriptedEngine, says
from support.serving import serving
from support.tiny_tokenizer import CHAT_TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = "<tool_call>\n<function=look_up>\n<parameter=word>\nsea\n</parameter>\n</function>\n</tool_call>"


def events(http, **body):
    """The events of a stream; the last is None for [DONE]."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **body}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = answer.read().decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


def test_an_answer(ask, engine):
    engine.scheduler.reused = 5
    status, body = ask(temperature=0.5, seed=-1, max_completion_tokens=50, max_tokens=3, user="me", store=True)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello, world.", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    [request] = engine.scheduler.requests
    prompt = len(request.prompt)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 13,
        "total_tokens": prompt + 13,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert bytes(token for token in request.prompt if token < 256) == b"user\nHi\nassistant\n"
    assert request.boundaries
    assert (request.sampling.temperature, request.seed, request.max_tokens) == (0.5, (1 << 64) - 1, 50)


def test_sampling_reaches_the_engine(ask, engine):
    asked = {"top_p": 0.5, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1.5,
             "repetition_penalty": 1.25, "logit_bias": {"65": -100}, "stop_token_ids": [66]}  # fmt: skip
    assert ask(**asked)[0] == 200
    [request] = engine.scheduler.requests
    sampling = request.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1.5, 1.25)
    assert sampling.logit_bias == {65: -100}
    assert request.stop_tokens == {66}
    assert sampling.temperature == 0  # the model's own default


def test_a_limit_is_a_finish_reason(ask):
    _, body = ask(max_tokens=4)
    assert body["choices"][0]["message"]["content"] == "Hell"
    assert body["choices"][0]["finish_reason"] == "length"


def test_stop_strings_end_the_work(ask, engine, server):
    engine.scheduler.script = says("one two three four" * 500)
    _, body = ask(stop=["three"])
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "stop"
    server.wait(lambda: engine.scheduler.cancelled == 1)


def test_several_choices(ask, engine):
    engine.scheduler.script = lambda request: [65 + request.seed, 258]
    _, body = ask(n=3, seed=1)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["B", "C", "D"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(engine.scheduler.requests[0].prompt)
    assert body["usage"]["completion_tokens"] == 3


def test_a_stream(http, engine):
    engine.scheduler.script = says("Grüße 🎉")
    *chunks, usage, done = events(http, stream_options={"include_usage": True})
    assert done is None
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Grüße 🎉"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert chunks[0]["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len("Grüße 🎉".encode())


def test_a_stream_without_usage_has_none(http):
    assert not [chunk for chunk in events(http)[:-1] if "usage" in chunk]


def test_a_stream_of_several_choices(http, engine):
    engine.scheduler.script = lambda request: [65 + request.seed, 66 + request.seed, 258]
    text = {0: "", 1: ""}
    for chunk in events(http, n=2, seed=0)[:-1]:
        [choice] = chunk["choices"]
        text[choice["index"]] += choice["delta"].get("content", "")
    assert text == {0: "AB", 1: "BC"}


def test_reasoning_is_apart(ask, http, engine):
    engine.scheduler.script = says("hm\n</think>\n\nYes.")
    _, body = ask(enable_thinking=True)
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"
    assert body["choices"][0]["message"]["content"] == "Yes."
    chunks = events(http, chat_template_kwargs={"enable_thinking": True})[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [({}, False), ({"enable_thinking": True}, True), ({"reasoning_effort": "low"}, True),
     ({"reasoning_effort": "none"}, False), ({"enable_thinking": False, "reasoning_effort": "high"}, False)],
)  # fmt: skip
def test_thinking_is_asked_for(ask, engine, asked, thinks):
    ask(**asked)
    assert (259 in engine.scheduler.requests[0].prompt) is thinks


def test_tool_calls(ask, http, engine):
    engine.scheduler.script = says(f"Let me see.\n{CALL}\n{CALL}")
    _, body = ask(tools=[TOOL])
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "look_up", "arguments": '{"word": "sea"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    chunks = events(http, tools=[TOOL])[:-1]
    streamed = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in streamed] == [0, 1]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_tool_call_is_enough(ask, engine):
    engine.scheduler.script = says(f"{CALL}\n{CALL}")
    for asked in (
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    ):
        _, body = ask(tools=[TOOL], **asked)
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1
        assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_that_are_not_to_be_used_are_not_shown(ask, engine):
    engine.scheduler.script = says(CALL)
    _, body = ask(tools=[TOOL], tool_choice="none")
    assert body["choices"][0]["message"]["content"] == CALL
    assert b"look_up" not in bytes(token for token in engine.scheduler.requests[0].prompt if token < 256)


def test_a_call_can_be_demanded(ask, engine):
    engine.scheduler.script = says(CALL)
    _, body = ask(tools=[TOOL], tool_choice="required")  # the script asserts that every token is allowed
    assert body["choices"][0]["message"]["tool_calls"]
    mask = engine.scheduler.requests[0].mask
    assert mask is not None


def test_the_answer_can_be_made_json(ask, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    engine.scheduler.script = says('{"a": 12}')
    assert ask(response_format=form)[1]["choices"][0]["message"]["content"] == '{"a": 12}'
    engine.scheduler.script = says('hm { </think>\n\n{"a": 12}')
    message = ask(response_format=form, enable_thinking=True)[1]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm { ", '{"a": 12}')
    engine.scheduler.script = lambda request: []
    assert ask(response_format={"type": "json_object"})[0] == 200
    allowed = engine.scheduler.requests[-1].mask.allowed()
    assert allowed[ord("{")]
    assert not allowed[ord("[")]
    assert ask(response_format={"type": "text"})[0] == 200
    assert engine.scheduler.requests[-1].mask is None


def test_a_schema_that_is_none(ask):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    status, body = ask(response_format=form)
    assert status == 400
    assert body["error"]["param"] == "response_format"


def test_log_probabilities(ask, http):
    _, body = ask(logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert content[0]["logprob"] == -0.72
    assert content[0]["bytes"] == [72]
    assert content[0]["top_logprobs"] == [
        {"token": "H", "logprob": -0.72, "bytes": [72]},
        {"token": "I", "logprob": -0.73, "bytes": [73]},
    ]
    chunks = events(http, logprobs=True)[:-1]
    streamed = [
        entry["token"]
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    ]  # fmt: skip
    assert "".join(streamed) == "Hello, world."


def test_a_history_with_tools(ask, engine):
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "here"},
    ]
    assert ask(messages=messages)[0] == 200
    text = bytes(token for token in engine.scheduler.requests[0].prompt if token < 256).decode()
    assert text == "system\nBe brief.\nuser\nWo?\nassistant\n<tool_call>look_up</tool_call>\ntool\nhere\nassistant\n"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x" * 1001]}, "stop.0"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [[]] * 20_000}}, "chat_template_kwargs"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"a": [0] * 20_000}}}]}, "tools"),
        ({"response_format": {"type": "json_object", "a": [[[0] * 10_000] * 2]}}, "response_format"),
        ({"functions": [TOOL]}, "functions"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
def test_what_is_wrong_is_named(ask, engine, asked, param):
    status, body = ask(**asked)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert not engine.scheduler.requests


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"top_logprobs": 0, "logprobs": False},
        {"stop": ""},
        {"stop": ["", "Nothing"]},
        {"stop": [str(number) for number in range(64)]},
        {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "Hi"}]},
    ],
)
def test_what_clients_send_for_nothing_is_taken(ask, asked):
    status, body = ask(**asked)
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "Hello, world."
    assert body["choices"][0]["logprobs"] is None


def test_a_prompt_that_is_too_long_has_its_code(ask):
    assert ask(messages=[{"role": "user", "content": "x" * 5000}])[1]["error"]["code"] == "context_length_exceeded"


def test_models_have_names(ask):
    assert ask(model="other-name")[1]["model"] == "other-name"
    status, body = ask(model="gpt-5")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["param"] == "model"


def test_a_model_without_tools_and_one_without_a_template(tmp_path):
    engine = ScriptedEngine(tmp_path, template=CHAT_TEMPLATE)
    with serving(lambda: engine) as server:
        path = f"{server.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert httpx.post(path, json=body).status_code == 200
        answer = httpx.post(path, json={**body, "tools": [TOOL]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / name).unlink()
        del engine.template, engine.dialogue
        answer = httpx.post(path, json=body)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
