"""Browsers: by which names they may have found the server, and whose pages may ask it."""

import httpx
import pytest

from mosaic.runtime.serve.origins import is_loopback
from support.serving import serving

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def local(engine):
    """As a server that only this machine reaches, and that asks for no keys."""
    with serving(lambda: engine, hosts=("My-Machine",)) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:80", "localhost.", "a.b.localhost", "127.0.0.1", "127.0.0.1:1", "192.168.0.7:8080",
     "[::1]", "[::1]:8080", "my-machine", "my-machine:8080"],
)  # fmt: skip
def test_names_that_no_site_can_have(local, host):
    assert local.get("/v1/models", headers={"host": host}).status_code == 200
    assert local.post(CHAT, json=ASKED, headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example.com", "evil.example.com:8080", "127.example.org", "localhost.evil.com", "evillocalhost",
     "127.0.0.1.x", "localhost@evil.com:80", "[::1", "a b", "%6cocalhost", "0", "\xff"],
)  # fmt: skip
def test_names_that_a_site_may_have_made_up(local, host):
    """DNS rebinding: the site's name, as Host and in Origin, resolves to this machine."""
    headers = {"host": host.encode("latin-1"), "origin": f"http://{host}".encode("latin-1")}
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/metrics"), ("GET", "/nothing")):
        answer = local.request(method, path, json=ASKED, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
        assert "--api-key" in answer.json()["error"]["message"]


def test_other_servers_have_any_name(http):
    assert http.post(CHAT, json=ASKED, headers={"host": "llm.example.com"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "", "file://", "app://obsidian.md"]
)
def test_other_sites_may_not_post(http, engine, origin):
    answer = http.post(CHAT, json=ASKED, headers={"origin": origin})
    assert answer.status_code == 403
    assert "--cors-origin" in answer.json()["error"]["message"]
    assert not engine.scheduler.requests
    assert http.get("/v1/models", headers={"origin": origin}).status_code == 200  # which they cannot read


def test_its_own_page_may(http, server):
    assert http.post(CHAT, json=ASKED, headers={"origin": server.url}).status_code == 200
    named = {"host": "llm.example.com", "origin": "https://llm.example.com"}
    assert http.post(CHAT, json=ASKED, headers=named).status_code == 200


@pytest.mark.parametrize("origins", [("http://a.example", "app://b"), ("*",)])
def test_sites_that_are_named_may(engine, origins):
    with serving(lambda: engine, origins=origins) as server:
        for origin in ("http://a.example", "app://b"):
            assert httpx.post(server.url + CHAT, json=ASKED, headers={"origin": origin}).status_code == 200
        other = httpx.post(server.url + CHAT, json=ASKED, headers={"origin": "http://c.example"})
        assert other.status_code == (200 if origins == ("*",) else 403)


def test_what_only_this_machine_reaches():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.7")))
