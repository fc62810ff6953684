"""What a body may cost: its memory, its time, and everyone else's."""

import gc
import json
import socket
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from mosaic.runtime.serve.body import MOST_VALUES, decode
from mosaic.runtime.serve.completion_schema import CompletionRequest
from mosaic.runtime.serve.endpoint import LONG
from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.service import Limits
from support.serving import PATIENCE, serving

PATH = "/v1/completions"


@pytest.mark.parametrize(
    "value",
    [
        [{}] * MOST_VALUES,
        [[]] * MOST_VALUES,
        {str(number): 0 for number in range(MOST_VALUES + 1)},
        {"a": ['\\"', '"', "\\", ","] * (MOST_VALUES // 4)},
    ],
)
def test_bodies_of_too_many_values_are_refused(value):
    with pytest.raises(ApiError) as caught:
        decode(json.dumps(value).encode())
    assert caught.value.status == 413
    assert caught.value.body["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "value", [",[{" * MOST_VALUES, '\\"[,{' * MOST_VALUES, [0] * (MOST_VALUES - 1), {"a\\": "{[,"}]
)
def test_long_texts_and_long_prompts_are_taken(value):
    assert decode(json.dumps(value).encode()) == value


def test_a_full_house_does_not_read_bodies(engine):
    engine.scheduler.script = lambda request: [72, threading.Event()]
    with serving(lambda: engine, limits=Limits(parallel=1, max_queue=0)) as server:
        with (
            httpx.stream("POST", server.url + PATH, json={"prompt": "x", "stream": True}),
            closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)) as connection,
        ):
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode())
            assert b" 503 " in connection.recv(100)
        server.wait(lambda: engine.scheduler.active == 0)


def test_an_answer_does_not_hold_the_body(server, engine, http):
    """However long it takes."""
    engine.scheduler.script = lambda request: [72, threading.Event()]
    http.post(PATH, json={"prompt": "x", "max_tokens": 1})
    size = 1 << 20
    content = json.dumps({"prompt": "x", "stream": True, "junk": "y" * size}).encode()
    tracemalloc.start()
    try:
        with http.stream("POST", PATH, content=content, headers={"content-type": "application/json"}) as answer:
            lines = answer.iter_lines()
            assert any('"H"' in line for line in lines)
            gc.collect()
            assert not [each for each in gc.get_objects() if type(each) is CompletionRequest]
            assert tracemalloc.get_traced_memory()[0] < size / 2
            assert tracemalloc.get_traced_memory()[1] > size
    finally:
        tracemalloc.stop()
    server.wait(lambda: engine.scheduler.active == 0)


def test_short_prompts_do_not_wait_for_long_ones(server, engine, http, monkeypatch):
    encode, go, waiting = engine.tokenizer.encode, threading.Event(), threading.Semaphore(0)

    def slow(text, at_most=None):
        if len(text) > LONG:
            waiting.release()
            assert go.wait(PATIENCE)
        return encode(text, at_most)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    with ThreadPoolExecutor(4) as threads:
        try:
            body = {"prompt": "x" * (LONG + 1)}
            long = [threads.submit(httpx.post, server.url + PATH, json=body, timeout=PATIENCE) for _ in range(4)]
            assert waiting.acquire(timeout=PATIENCE)
            assert waiting.acquire(timeout=PATIENCE)
            assert http.post(PATH, json={"prompt": "hi"}).status_code == 200
            assert not any(each.done() for each in long)
        finally:
            go.set()
    assert [each.result().json()["error"]["code"] for each in long] == ["context_length_exceeded"] * 4


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_what_cannot_fit_is_not_tokenised(engine, ask, path):
    text = "x" * 200_000
    asked = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
    status, body = ask(path, **asked)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert f"more than {engine.context} tokens" in body["error"]["message"]
