"""The server over a real model, the demo, by the openai client: what comes out is what the engine says alone."""

import asyncio
import json

import openai
import pytest

from mosaic.runtime import Engine
from support.serving import serving

QUESTIONS = [
    "Tell me about the sea.",
    "Tell me about Ruth 1.",
    "Who is Mr. Darcy?",
    "Grüße 🎉 from where?",
    "And then?",
]
GREEDY = {"model": "tiny", "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"book": {"type": "string", "enum": ["Ruth", "Emma"]}, "deep": {"type": "boolean"}},
            "required": ["book", "deep"],
            "additionalProperties": False,
        },
    },
}


def asking(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def alone(demo):
    """The same model, without a server."""
    return Engine.load(demo, context=512)


@pytest.fixture(scope="module")
def server(demo):
    with serving(lambda: Engine.load(demo, context=512, parallel=3)) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_concurrent_answers_are_those_of_each_alone(server, alone):
    expected = [alone.chat(asking(question), temperature=0, max_tokens=24)["content"] for question in QUESTIONS]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(question: str, stream: bool) -> str:
                asked = {**GREEDY, "messages": asking(question), "max_tokens": 24}
                if not stream:
                    return (await client.chat.completions.create(**asked)).choices[0].message.content
                chunks = await client.chat.completions.create(**asked, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*(one(question, stream) for stream in (False, True) for question in QUESTIONS))

    assert asyncio.run(ask()) == expected * 2


def test_a_prompt_is_scored_as_the_engine_scores_it(client, alone):
    prompt = "In the beginning God created"
    answer = client.completions.create(**GREEDY, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    found = answer.choices[0].logprobs.token_logprobs
    tokens = alone.tokenizer.encode(prompt)
    assert len(found) == len(tokens) + 1
    assert found[0] is None
    assert found[1:-1] == pytest.approx(alone.score(tokens[:1], tokens[1:]), abs=1e-5)


def test_log_probabilities_of_an_answer(client):
    answer = client.chat.completions.create(
        **GREEDY, messages=asking(QUESTIONS[0]), max_tokens=6, logprobs=True, top_logprobs=3
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)


def test_the_second_turn_goes_on_from_the_first(client):
    messages = asking("Tell me about Emma, and at some length, since there is much to be told of her.")
    first = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=10)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, *asking("And then?")]
    second = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=10)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2


def test_choices_share_their_prompt(client):
    prompt = "What do the choices share, if not what all of them are told, and told at the same time?"
    asked = {"model": "tiny", "messages": asking(prompt), "n": 3, "temperature": 1.5, "max_tokens": 8, "seed": 5}
    first, second = (
        [choice.message.content for choice in client.chat.completions.create(**asked).choices] for _ in "ab"
    )
    assert len(set(first)) == 3
    assert second == first


def test_json_by_a_schema(client):
    schema = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=asking("Which?"), response_format=form, seed=1)
    found = json.loads(answer.choices[0].message.content)
    assert found["book"] in ("Ruth", "Emma")
    assert type(found["deep"]) is bool


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_call_that_is_demanded(client, choice):
    asked = {"model": "tiny", "messages": asking("Which?"), "tools": [TOOL], "tool_choice": choice, "seed": 1}
    answer = client.chat.completions.create(**asked, parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert set(json.loads(call.function.arguments)) == {"book", "deep"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_stream_that_is_closed_frees_its_place(client, server):
    for _ in range(4):  # one more than there are places
        stream = client.completions.create(model="tiny", prompt="And", max_tokens=400, stream=True, logprobs=0)
        next(iter(stream))
        stream.close()
    server.wait(lambda: server.service.engine.scheduler.active + server.service.engine.scheduler.waiting == 0)
    assert client.completions.create(**GREEDY, prompt="And", max_tokens=2).usage.completion_tokens == 2
