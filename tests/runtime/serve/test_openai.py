"""The client that most people use, sync and async, on a scripted engine."""

import asyncio
import threading

import openai
import pytest
from pydantic import BaseModel

from support.scripted import says
from support.serving import serving

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("tiny").owned_by == "mosaic"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("gpt-5")


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, logprobs=True)
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage.completion_tokens == 13
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_as_a_stream(client, engine):
    engine.scheduler.script = says("hm</think>\n\nGrüße")
    options = {"stream_options": {"include_usage": True}, "extra_body": {"enable_thinking": True}}
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Grüße"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert chunks[-1].usage.total_tokens > 0


def test_the_helpers_for_streams(client):
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == "Hello, world."
        assert stream.get_final_completion().choices[0].message.content == text


def test_answers_by_a_type(client, engine):
    class Found(BaseModel):
        a: int

    engine.scheduler.script = says('{"a": 12}')
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Found)
    assert answer.choices[0].message.parsed == Found(a=12)


def test_tools(client, engine):
    engine.scheduler.script = says(
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    message = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools).choices[0].message
    assert message.tool_calls[0].function.arguments == '{"n": 3}'
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "9"}
    engine.scheduler.script = says("Nine.")
    answer = client.chat.completions.create(model="tiny", messages=[*MESSAGES, message, result], tools=tools)
    assert answer.choices[0].message.content == "Nine."


def test_completions(client):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["aH", "bH"]
    assert answer.choices[0].logprobs.tokens == ["a", "H"]
    stream = client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world."


def test_errors_are_the_clients_own(client, engine):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError, match="no embeddings") as refused:
        client.embeddings.create(model="tiny", input="x")
    assert refused.value.status_code == 501
    with serving(lambda: engine, keys=("right",)) as guarded:
        for key, outcome in (("right", None), ("wrong", openai.AuthenticationError)):
            with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as other:
                if outcome is None:
                    assert list(other.models.list())
                    continue
                with pytest.raises(outcome):
                    other.models.list()


def test_a_stream_that_is_closed_is_cancelled(client, engine, server):
    engine.scheduler.script = lambda request: [72, threading.Event()]
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert next(chunk for chunk in stream if chunk.choices[0].delta.content).choices[0].delta.content == "H"
    stream.close()
    server.wait(lambda: engine.scheduler.cancelled == 1)


def test_many_at_a_time(server, engine):
    engine.scheduler.script = lambda request: [*bytes(token for token in request.prompt[:40] if token < 256), 258]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                prompt = f"number {number}"
                if number % 2:
                    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=50)
                    return answer.choices[0].text
                stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=50, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(ask()) == [f"number {number}" for number in range(20)]
    assert engine.scheduler.most == 2
