"""Routes, methods, bodies, keys, CORS: what is answered before any engine is asked."""

import contextlib
import http.client
import json
import re
import threading

import httpx
import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.serve.service import Limits
from support.scripted import RefusedError, ScriptedEngine, says
from support.serving import serving

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


def error_of(answer: httpx.Response) -> dict:
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


def test_models(http):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "other-name"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 4096


@pytest.mark.parametrize("name", ["gpt-5", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%00", "a" * 5000, "tiny/"])
def test_models_that_are_not_there(server, name):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", f"/v1/models/{name}")  # httpx would clean it
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["code"] == "model_not_found"
    connection.close()


def test_the_page_needs_no_key(engine):
    with serving(lambda: engine, keys=("one",)) as server, httpx.Client(base_url=server.url) as client:
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
        for path in ("/", *re.findall(r'(?:src|href)="(/?page/[^"]+)"', page.text)):
            assert client.get(path).status_code == 200
            assert client.get(path).headers["x-content-type-options"] == "nosniff"
        assert error_of(client.get("/page/no.js"))["code"] == "not_found"
        assert client.get("/page/%2e%2e/app.py").status_code == 404


def test_embeddings_are_refused(http):
    answer = http.post("/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 501
    assert "embeddings" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1", "/v1/chat", "/v1/chat/completions/", "/health/x", "/../etc/passwd"]
)
def test_unknown_paths(http, path):
    answer = http.post(path, json=ASKED)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("DELETE", CHAT), ("OPTIONS", CHAT), ("POST", "/health")])
def test_wrong_methods(http, method, path):
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"]
    assert error_of(answer)["code"] == "method_not_allowed"


def test_head(http):
    answer = http.head("/health")
    assert answer.status_code == 200
    assert answer.content == b""


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", None, 415, "unsupported_media_type"),
        (b"", "application/json", 400, "invalid_json"),
        (b"{", "application/json", 400, "invalid_json"),
        (b'{"temperature": NaN}', "application/json", 400, "invalid_json"),
        (b'{"temperature": 1e999}', "application/json", 400, None),
        (b'{"a": "\\ud800"}', "application/json", 400, "invalid_json"),
        (b'{"a": "\xff"}', "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b'{"seed": ' + b"9" * 100_000 + b"}", "application/json", 400, "invalid_json"),
        (b'{"seed": ' + b"9" * 1000 + b"}", "application/json", 400, None),
        (b"[]", "application/json", 400, None),
        (b"null", "application/json", 400, None),
    ],
)
def test_bodies_that_are_none(http, body, kind, status, code):
    answer = http.post(CHAT, content=body, headers={"content-type": kind} if kind else {})
    assert answer.status_code == status
    assert error_of(answer)["code"] == code


def test_a_content_type_may_have_parameters(http):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(CHAT, content=json.dumps(ASKED), headers=headers).status_code == 200


def test_cors_is_off(http):
    answer = http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_metrics(http, engine, ask):
    engine.scheduler.reused = 2
    ask()
    ask(temperature=5)
    http.get("/no/such/path")
    text = http.get("/metrics").text
    assert 'mosaic_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert 'mosaic_requests_total{route="/v1/chat/completions",status="400"}' in text
    assert 'mosaic_requests_total{route="other",status="404"}' in text
    assert "/no/such/path" not in text
    for name in (
        "prompt_tokens_total", "reused_prompt_tokens_total", "generated_tokens_total",
        "time_to_first_token_seconds_count", "time_per_token_seconds_count", "active_requests", "waiting_requests",
        "cached_states", "expert_hits_total", "disk_bytes_total", "device_expert_hits_total", "device_bytes_total",
    ):  # fmt: skip
        assert f"\nmosaic_{name} " in text, name
    assert "\nmosaic_disk_bytes_total 4096.0\n" in text


def test_nothing_that_was_said_is_logged(ask, http, engine, caplog):
    caplog.set_level("INFO", "mosaic.serve")
    engine.scheduler.script = says("secret answer")
    ask(messages=[{"role": "user", "content": "secret question"}], user="secret user")
    http.get("/v1/models/sec%0aret?key=secret")
    assert len(caplog.messages) == 2
    assert "secret" not in caplog.text
    assert f"POST {CHAT} 200" in caplog.messages[0]
    assert "answer 13, stop" in caplog.messages[0]
    assert "/v1/models/sec\\nret 404" in caplog.messages[1]


def test_keys(engine):
    with serving(lambda: engine, keys=("one", "zwei")) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer three"}, {"authorization": "one"},
                        {"authorization": "Basic one"}, {"authorization": b"Bearer \xff"}):  # fmt: skip
            for path in ("/v1/models", "/metrics", CHAT, "/v1/nothing"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "zwei"):
            headers = {"authorization": f"bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.post(CHAT, json=ASKED, headers=headers).status_code == 200


def test_cors_for_those_who_are_named(engine):
    with serving(lambda: engine, keys=("one",), origins=("http://a.example",)) as server:
        asking = {"origin": "http://a.example", "access-control-request-method": "POST",
                  "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        answer = httpx.options(server.url + CHAT, headers=asking)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        refused = httpx.get(f"{server.url}/v1/models", headers={"origin": "http://a.example"})
        assert refused.status_code == 401  # and its reason may be read
        assert refused.headers["access-control-allow-origin"] == "http://a.example"
        other = httpx.get(f"{server.url}/health", headers={"origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_long_bodies_are_refused(engine):
    with serving(lambda: engine, limits=Limits(max_body=1000)) as server:
        assert httpx.post(server.url + CHAT, json=ASKED).status_code == 200
        long = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        for content in (long, iter([long[:500], long[500:]])):  # with a length, and in chunks
            answer = httpx.post(server.url + CHAT, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "body_too_large"


def test_a_model_that_is_being_loaded(tmp_path):
    ready = threading.Event()

    def load():
        assert ready.wait(30)
        return ScriptedEngine(tmp_path)

    with serving(load, ready=False) as server:
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        answer = httpx.post(server.url + CHAT, json=ASKED)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "loading"
        assert int(answer.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        ready.set()
        server.wait(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        assert httpx.post(server.url + CHAT, json=ASKED).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails(engine):
    """A bug: everyone is told, and nothing hangs."""

    def script(request):
        raise ZeroDivisionError

    def load():
        engine.scheduler.script = script
        return engine

    with serving(load) as server:
        assert httpx.post(server.url + CHAT, json=ASKED).status_code == 503
        assert httpx.get(f"{server.url}/health").json() == {"status": "failed"}
        assert error_of(httpx.post(server.url + CHAT, json=ASKED))["code"] == "stopped"


def test_a_file_that_changes_ends_an_answer(ask, http, engine):
    lost = InputError("a shard was changed", file="/secret/place", remedy="restart")
    engine.scheduler.script = lambda request: [72, 105, lost]
    status, body = ask()
    assert status == 500
    assert body["error"]["type"] == "server_error"
    assert "shard was changed" in body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    with http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer:
        parts = answer.read().decode().split("\n\n")
    assert json.loads(parts[-3].removeprefix("data: ")) == body
    assert parts[-2:] == ["data: [DONE]", ""]
    assert "Hi" in "".join(parts[:-3]) or '"H"' in "".join(parts[:-3])
    engine.scheduler.script = says("again")
    assert ask()[0] == 200


def test_what_a_request_brought_about_is_no_fault_of_the_server(ask, http, engine):
    engine.scheduler.script = lambda request: [72, RefusedError("the grammar cannot be followed", remedy="simplify it")]
    status, body = ask()
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"] == "the grammar cannot be followed"
    with http.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer:
        parts = answer.read().decode().split("\n\n")
    assert json.loads(parts[-3].removeprefix("data: ")) == body


def test_too_many_connections(engine, monkeypatch):
    monkeypatch.setattr("mosaic.runtime.serve.server.SPARE_CONNECTIONS", 0)
    with serving(lambda: engine, limits=Limits(parallel=1, max_queue=0)) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(httpx.Client(base_url=server.url)) for _ in range(2))
        assert first.get("/health").status_code == 200  # and stays connected
        answer = second.get("/health")
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
        first.close()
        server.wait(lambda: second.get("/health").status_code == 200)
