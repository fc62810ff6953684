"""Server-sent events: one JSON object each, a comment now and then while there is nothing to tell, then [DONE]."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from mosaic.runtime.serve.errors import ApiError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers otherwise
]
COMMENT = b": keep-alive\n\n"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: dict[str, Any]) -> bytes:
    """JSON as it goes out: compact, UTF-8."""
    return _ENCODER.encode(value).encode()


def to_json_aside(value: dict[str, Any]) -> bytes:
    """The same for something long, in a thread: slower, but in steps between which other threads run."""
    return "".join(_ENCODER.iterencode(value)).encode()


async def send_events(events: AsyncIterator[dict[str, Any]], send: Send, keep_alive: float) -> None:
    """A whole response. An ApiError before the first event is raised, as an answer of its own; a later one is an event.

    `keep_alive`: seconds of silence after which a comment is sent.
    """
    first = await anext(events)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    try:
        await _send(send, _event(first))
        async with aclosing(_with_comments(events, keep_alive)) as parts:
            async for part in parts:
                await _send(send, part)
    except ApiError as error:
        await _send(send, _event(error.body))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _with_comments(events: AsyncIterator[dict[str, Any]], seconds: float) -> AsyncGenerator[bytes, None]:
    waiting: asyncio.Task[dict[str, Any] | None] | None = None
    try:
        while True:
            waiting = waiting or asyncio.create_task(_next(events))
            done, _ = await asyncio.wait({waiting}, timeout=seconds)
            if not done:
                yield COMMENT
                continue
            event, waiting = waiting.result(), None
            if event is None:
                return
            yield _event(event)
    finally:
        if waiting:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
