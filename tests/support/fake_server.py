"""A server that has the API's paths and the chat page, and answers by scripts: every way in which a stream can go."""

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parents[2] / "runtime" / "serve" / "page"
KEY = "right-key"


class Gate:
    """In a script: nothing more is sent before the test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        while not self._open.is_set():
            await asyncio.sleep(0.005)


class Break:
    """In a script: the connection is cut."""


@dataclass
class Refusal:
    """An answer that is an error."""

    status: int
    message: str | None = "said why"  # None: no JSON, as a proxy's page
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        if self.message is None:
            return Response("<h1>Bad gateway</h1>", self.status, self.headers, media_type="text/html")
        return JSONResponse({"error": {"message": self.message, "type": "x"}}, self.status, self.headers)


Script = Sequence[bytes | Gate | type[Break]]


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(content: str = "", reasoning: str = "", end: str | None = None) -> bytes:
    """A chunk of an answer."""
    said = {name: text for name, text in (("content", content), ("reasoning_content", reasoning)) if text}
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": end}], "usage": None})


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The last chunk."""
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def whole(content: str, reasoning: str = "") -> list[bytes]:
    """A script in which nothing goes wrong."""
    thought = [delta(reasoning=reasoning)] if reasoning else []
    return [delta(), *thought, delta(content), delta(end="stop"), usage(12, 3, 4), DONE]


class FakeServer:
    """`scripts`: for the next questions; `models`: refusals of the next looks at /v1/models; `bodies`: all asked."""

    def __init__(self) -> None:
        self.address = ""
        self.reset()
        routes = [
            Route("/", self._index),
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    def reset(self) -> None:
        self.scripts: deque[Script | Refusal] = deque()
        self.models: deque[Refusal] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.gone = threading.Event()  # a client went away in the middle of a stream
        self.key_needed = False

    async def _index(self, _: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def _models(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if self.models:
            return self.models.popleft().response()
        return JSONResponse({"object": "list", "data": [{"id": "some-model", "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        self.bodies.append(await request.json())
        script = self.scripts.popleft()
        if isinstance(script, Refusal):
            return script.response()
        return StreamingResponse(self._play(script), media_type="text/event-stream")

    def _refused(self, request: Request) -> Response | None:
        known = not self.key_needed or request.headers.get("authorization") == f"Bearer {KEY}"
        return None if known else Refusal(401, "no valid API key was given").response()

    async def _play(self, script: Script) -> AsyncIterator[bytes]:
        try:
            for step in script:
                if isinstance(step, bytes):
                    yield step
                elif isinstance(step, Gate):
                    await step.passed()
                else:
                    raise ConnectionResetError("as the script has it")
        except asyncio.CancelledError:
            self.gone.set()
            raise


@contextlib.contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """The server at work, in a thread, at its `address`."""
    config = uvicorn.Config(fake.app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.address = f"http://127.0.0.1:{port}/"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
