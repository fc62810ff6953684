"""What every request passes: a line in the log and the metrics, then the keys."""

import hmac
import logging
import time
from collections.abc import Sequence
from hashlib import sha256

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.metrics import Metrics
from mosaic.runtime.serve.tally import Tally

LOG = logging.getLogger("mosaic.serve")
GONE = 499  # in the log only: the client did not wait for an answer
LONGEST = 200  # characters of a path in the log

#: Prefixes of what is told to those with a key only.
GUARDED = ("/v1", "/metrics")


class Recorded:
    """One line for each request: what was asked for, what came of it, and how much of it. Never what was said."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, tally = time.perf_counter(), 0, Tally()
        scope.setdefault("state", {})["tally"] = tally

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            status = GONE
        except BaseException:
            status = status or 500
            raise
        finally:
            path = scope["path"]
            self._metrics.served(path if path in self._routes else "other", status, tally)
            LOG.info("%s", _line(scope, status, time.perf_counter() - start, tally))


class Keys:
    """Lets through who has one of the keys, if there are any."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; 401 without a key."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"].startswith(GUARDED) and not self._known(scope):
            challenge = {"www-authenticate": "Bearer"}
            app = ApiError(401, "no valid API key was given", code="invalid_api_key", headers=challenge).response()
        await app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        """In the same time, whichever key it is and however much of it is right."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _line(scope: Scope, status: int, seconds: float, tally: Tally) -> str:
    path = ascii(scope["path"])[1:-1]
    client = scope["client"][0] if scope.get("client") else "-"
    line = f"{client} {scope['method']} {path[:LONGEST]} {status} {seconds:.3f} s"
    if tally.prompt:
        line += f", prompt {tally.prompt} tokens ({tally.cached} known), answer {tally.completion}"
    return f"{line}, {tally.finish_reason}" if tally.finish_reason else line
