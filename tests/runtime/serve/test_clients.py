"""Clients that go away, are slow, or are many. By raw sockets, where an HTTP library would be too polite."""

import json
import socket
import threading
from contextlib import closing

import httpx
import pytest

from mosaic.runtime.serve.service import Limits
from support.scripted import says
from support.serving import PATIENCE, Served, serving

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def post(server: Served, **body: object) -> socket.socket:
    """A connection on which a chat completion was asked for."""
    content = json.dumps({**ASKED, **body}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = connect(server)
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    read = b""
    while text not in read:
        part = connection.recv(4096)
        assert part, read
        read += part
    return read


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_goes_away_frees_the_place(server, engine, stream):
    never = threading.Event()
    engine.scheduler.script = lambda request: [72, 105, never]
    with closing(post(server, stream=stream)) as connection:
        if stream:
            read_until(connection, b'"content":"H"')
        server.wait(lambda: engine.scheduler.active == 1)
    server.wait(lambda: engine.scheduler.cancelled == 1)
    assert engine.scheduler.active == 0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json={**ASKED, "n": 2, "stream": stream}, timeout=0.2)
    server.wait(lambda: engine.scheduler.cancelled >= 2 and engine.scheduler.active == 0)


def test_whoever_goes_away_frees_the_place_in_the_queue(server, engine):
    never = threading.Event()
    engine.scheduler.script = lambda request: [never]
    connections = [post(server) for _ in range(3)]  # two places
    server.wait(lambda: engine.scheduler.waiting == 1 and engine.scheduler.active == 2)
    connections[2].close()
    server.wait(lambda: engine.scheduler.waiting == 0)
    assert engine.scheduler.active == 2
    for connection in connections[:2]:
        connection.close()
    server.wait(lambda: engine.scheduler.active == 0)


def test_a_client_may_go_before_it_has_asked(server, http):
    for sent in (b"", b"POST", b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc"):
        with closing(connect(server)) as connection:
            connection.sendall(sent)
    assert http.get("/health").status_code == 200


def test_silence_is_filled(engine):
    later = threading.Event()
    engine.scheduler.script = lambda request: [later, 72, 258]
    with (
        serving(lambda: engine, limits=Limits(keep_alive=0.02)) as server,
        closing(post(server, stream=True)) as connection,
    ):
        read = read_until(connection, b": keep-alive\n\n")
        assert b'"role":"assistant"' in read
        later.set()
        assert b'"content":"H"' in read_until(connection, b"[DONE]\n\n")


def test_too_many_are_sent_away(engine):
    later = threading.Event()
    engine.scheduler.script = lambda request: [later, 72, 258]
    with serving(lambda: engine, limits=Limits(parallel=2, max_queue=1)) as server:
        connections = [post(server) for _ in range(3)]
        server.wait(lambda: engine.scheduler.active + engine.scheduler.waiting == 3)
        answer = httpx.post(server.url + CHAT, json=ASKED)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
        later.set()
        for connection in connections:
            assert read_until(connection, b'"content":"H"').startswith(b"HTTP/1.1 200")
            connection.close()
        assert httpx.post(server.url + CHAT, json=ASKED).status_code == 200


def test_slow_clients_are_not_waited_for(engine):
    """For a header, for a body, and for what was written to be read."""
    engine.scheduler.script = says("x" * 60_000)
    with serving(lambda: engine, limits=Limits(timeout=0.3)) as server:
        silent, header, body = connect(server), connect(server), connect(server)
        header.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost")
        body.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        reader = post(server, stream=True, logprobs=True, top_logprobs=20)  # some 100 MB
        assert silent.recv(1000) == b""
        assert header.recv(1000) == b""
        answer = read_until(body, b"}}")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"timeout"' in answer
        server.wait(lambda: not server.server.server_state.connections)
        server.wait(lambda: engine.scheduler.active == 0)
        for connection in (silent, header, body, reader):
            connection.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_answers_grow_side_by_side(server, engine):
    """The second is done while the first still waits for its third token."""
    later = threading.Event()
    scripts = [[72, 72, later, 72, 258], [73, 73, 258]]
    engine.scheduler.script = lambda request: scripts.pop(0)
    with closing(post(server, stream=True)) as first:
        read_until(first, b'"content":"H"')
        assert httpx.post(server.url + CHAT, json=ASKED).json()["choices"][0]["message"]["content"] == "II"
        later.set()
        read_until(first, b"[DONE]")


def test_requests_may_follow_at_once(server):
    """Pipelined on one connection, and answered in order."""
    with closing(connect(server)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        read = read_until(connection, b"max_model_len")
        assert read.count(b"HTTP/1.1 200") == 2
