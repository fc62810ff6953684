"""A POST as an ASGI application: limits first, then the work, and an end when the client goes."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mosaic.runtime.serve.body import decode, read
from mosaic.runtime.serve.job import Job
from mosaic.runtime.serve.schema import Common, parse
from mosaic.runtime.serve.service import Service
from mosaic.runtime.serve.stream import send_events
from mosaic.runtime.serve.tally import Tally

LONG = 1 << 16  # bytes of a body that may take its time to be tokenised
JSON_HEADERS = [(b"content-type", b"application/json")]

Body = TypeVar("Body", bound=Common)


class Endpoint(Generic[Body]):
    """Answers bodies of one kind. `plan` makes of one what is to be done; it runs beside the event loop."""

    def __init__(self, service: Service, kind: type[Body], plan: Callable[[Service, Body], Job]) -> None:
        self._service = service
        self._kind = kind
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        self._service.worker.check()
        with self._service.admitted():  # before the body: it takes memory
            reading = read(Request(scope, receive), self._service.limits)  # into no variable of this frame
            await _while_connected(receive, self._answer(await reading, scope["state"]["tally"], send))

    async def _answer(self, content: bytes, tally: Tally, send: Send) -> None:
        service = self._service
        job = await self._job(content)
        del content  # an answer may take hours
        tally.prompt = job.prompt_tokens
        if job.stream:
            async with aclosing(job.events(service, tally)) as events:
                await send_events(events, send, service.limits.keep_alive)
            return
        answer = await job.whole(service, tally)
        headers = [*JSON_HEADERS, (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _job(self, content: bytes) -> Job:
        service = self._service
        job = await service.prepare(
            lambda: self._plan(service, parse(self._kind, decode(content))), long=len(content) > LONG
        )
        if (constraint := job.constraint) is None:
            return job
        masks = await service.prepare_alone(lambda: constraint.masks(service.engine, len(job.choices)))
        choices = [
            replace(choice, request=replace(choice.request, mask=mask))
            for choice, mask in zip(job.choices, masks, strict=True)
        ]
        return replace(job, choices=choices, constraint=None)


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
