"""What a client is told when something is wrong, in the API's own form. Never a traceback, never a file's name."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from mosaic.format.errors import InputError

LONGEST = 500  # characters of a message: some repeat what the client sent


class ApiError(Exception):
    """An answer that is an error: HTTP status, and the object that every client of the API knows how to read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {
            "error": {
                "message": message if len(message) <= LONGEST else message[:LONGEST] + "...",
                "type": _kind(status),
                "param": param,
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def refused(error: InputError, param: str | None = None) -> ApiError:
    """What the engine refuses because of the request: 400. Files and remedies are for whoever runs the server."""
    facts = [f"{name} {error.facts[name]}" for name in ("found", "expected") if name in error.facts]
    return ApiError(400, f"{error.problem}: {', '.join(facts)}" if facts else error.problem, param=param)


def unavailable(message: str, code: str, *, retry_after: int, headers: Mapping[str, str] | None = None) -> ApiError:
    """503 for what will pass: loading, a full queue, a server on its way out. `retry_after`: seconds."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after), **(headers or {})})


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "server_error" if status >= 500 else "invalid_request_error"
