"""A server of a scripted engine, and ways to ask it."""

from collections.abc import Iterator

import httpx
import pytest

from support.scripted import ScriptedEngine, says
from support.serving import Served, serving


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedEngine:
    return ScriptedEngine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    """Every test begins with the same script, and knows what it asked for itself."""
    if "engine" in request.fixturenames:
        scheduler = request.getfixturevalue("engine").scheduler
        scheduler.script, scheduler.reused = says("Hello, world."), 0
        scheduler.requests.clear()
        scheduler.cancelled = scheduler.most = 0


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20.0) as client:
        yield client


@pytest.fixture
def ask(http: httpx.Client):
    """Asks for a chat completion; gives status and body."""

    def ask(path: str = "/v1/chat/completions", **body: object) -> tuple[int, dict]:
        if path == "/v1/chat/completions":
            body = {"messages": [{"role": "user", "content": "Hi"}], **body}
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()

    return ask
