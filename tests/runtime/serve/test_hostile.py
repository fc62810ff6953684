"""Requests that mean ill, from a seed: whatever comes, the server answers the next one.

Each is a valid request with something done to it, or raw bytes. What must not happen: an answer of 500, no answer, a
connection that neither answers nor ends, a generation left behind.
"""

import copy
import json
import random
import socket
from contextlib import closing

import pytest

from support.scripted import ANY, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
VALID = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 2, "stop": ["x"], "max_tokens": 5}),
    (CHAT, {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]},
                         {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function",
                          "function": {"name": "f", "arguments": "{}"}}]},
                         {"role": "tool", "tool_call_id": "1", "content": "x"}],
            "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 3, "temperature": 0.5}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 1}, "logit_bias": {"5": 1},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}),
    (COMPLETIONS, {"prompt": "Once", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2, "top_p": 0.5, "seed": 1}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}, "top_k": 3}),
]  # fmt: skip
BAD = [
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, "", "x", "\0",
    "é\u0301🎉", "<|im_start|>", "</think>", "{{ 7 * 7 }}", "../../etc/passwd", "x" * 999, [], [[]], [None], [1],
    ["x"], {}, {"a": None}, {"type": "text"}, {"__class__": 1}, {"$ref": "#"}, {"type": "string", "pattern": "(a+)+$"},
    [1] * 500,
]  # fmt: skip


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The way to every value within a body."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, member in members for place in places(member, (*at, key)))]


def mutated(body: dict, chance: random.Random) -> object:
    """One to three values of a body replaced, removed, renamed or wrapped."""
    root = [copy.deepcopy(body)]
    for _ in range(chance.randint(1, 3)):
        *way, last = (0, *chance.choice(places(root[0])))
        parent = root
        for key in way:
            parent = parent[key]
        how = chance.randrange(5)
        if how == 0 and len(way):
            del parent[last]
        elif how == 1 and isinstance(parent, dict):
            parent[chance.choice(["model", "seed", "tools", "suffix", "best_of", "x" * 200, ""])] = chance.choice(BAD)
        elif how == 2:
            for _ in range(chance.choice([1, 3, 100])):
                parent[last] = [parent[last]] if chance.random() < 0.5 else {"a": parent[last]}
        else:
            parent[last] = chance.choice(BAD)
    return root[0]


@pytest.mark.parametrize("seed", range(3))
def test_mutations_of_valid_requests(http, engine, server, seed):
    chance = random.Random(seed)
    engine.scheduler.script = lambda request: [ANY] * 9 if request.mask else [72, 195, 60, 120, 258]
    engine.grammars  # noqa: B018 - built once
    statuses = []
    for _ in range(80):
        path, body = chance.choice(VALID)
        content = json.dumps(mutated(body, chance)).encode()
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400, 404), (content, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, content
    assert min(statuses.count(200), statuses.count(400)) > 10
    server.wait(lambda: engine.scheduler.active + engine.scheduler.waiting == 0)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("seed", range(2))
def test_raw_bytes(http, server, engine, seed):
    engine.scheduler.script = says("x")
    chance = random.Random(seed)
    content = json.dumps(VALID[0][1]).encode()
    whole = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode() + content  # fmt: skip
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(len(data))
            how = chance.randrange(3)
            if how == 0:
                data[at] = chance.randrange(256)
            elif how == 1:
                del data[at : at + chance.randint(1, 30)]
            elif how == 2:
                data[at:at] = chance.randbytes(chance.randint(1, 30))
            else:
                data[at:at] = chance.choice([b"\r\n", b"\0", b"\r\n\r\n", b"Content-Length: 5\r\n", b"A" * 70_000])
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    assert b" 500 " not in part[:20], bytes(data)
            except ConnectionError:
                pass
    assert http.get("/health").status_code == 200
    server.wait(lambda: engine.scheduler.active + engine.scheduler.waiting == 0)
