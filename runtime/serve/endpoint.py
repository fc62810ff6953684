"""A POST with a JSON body, as an ASGI application: limits first, then the handler, and an end when the client goes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.service import Limits, Service
from mosaic.runtime.serve.stream import send_events, to_json
from mosaic.runtime.serve.tally import Tally

Json = dict[str, Any]
Handler = Callable[[Service, object, Tally], Awaitable[Json | AsyncGenerator[Json, None]]]

JSON_HEADERS = [(b"content-type", b"application/json")]


class Endpoint:
    """Answers by a handler: with one object, or with events."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service = service
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        assert self._service.engine  # before the body, which may be long
        body = await _json(Request(scope, receive), self._service.limits)
        with self._service.admitted():
            await _while_connected(receive, self._answer(body, scope["state"]["tally"], send))

    async def _answer(self, body: object, tally: Tally, send: Send) -> None:
        answer = await self._handler(self._service, body, tally)
        if isinstance(answer, dict):
            content = to_json(answer)
            headers = [*JSON_HEADERS, (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return
        async with aclosing(answer) as events:
            await send_events(events, send, self._service.limits.keep_alive)


async def _json(request: Request, limits: Limits) -> object:
    """The body, parsed. Without NaN, half surrogates, and depths that a parser would have to fear."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also what keeps other web sites' forms out
        raise ApiError(415, "the content type is not application/json", code="unsupported_media_type")
    body = bytearray()
    too_long = ApiError(413, f"the body is longer than {limits.max_body} bytes", code="body_too_large")
    if int(request.headers.get("content-length", 0)) > limits.max_body:  # the HTTP library knows it to be a number
        raise too_long
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, "the body took too long", code="timeout", headers={"connection": "close"}) from error
    try:
        return from_json(bytes(body), allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but give it up when the client goes: ClientDisconnect."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
