"""The body of a POST: read within limits, and decoded unless it is made to be hard to hold."""

import asyncio
import re

from pydantic_core import from_json
from starlette.requests import Request

from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.service import Limits

#: Values of a body: a long prompt in tokens is that many. Empty ones would take 20 times the memory of their text.
MOST_VALUES = 300_000
TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


async def read(request: Request, limits: Limits) -> bytes:
    """The body; ApiError for one that is too long, too slow, or said to be no JSON."""
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
    return bytes(body)


def decode(content: bytes) -> object:
    """What JSON says. ApiError for NaN, half surrogates, depths to be feared, and more than MOST_VALUES values."""
    if _values(content) > MOST_VALUES and _values(TEXT.sub(b"", content)) > MOST_VALUES:
        raise ApiError(413, f"the body has more than {MOST_VALUES:,} values", code="body_too_large")
    try:
        return from_json(content, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _values(content: bytes) -> int:
    """Of JSON without texts; more where commas and brackets may be in texts."""
    return sum(map(content.count, (b",", b"[", b"{")))
