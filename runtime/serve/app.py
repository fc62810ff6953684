"""The ASGI application: which path is what, and errors in the API's form whoever raises them."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mosaic.runtime.serve.chat_completions import chat_completions
from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.serve.completion_schema import CompletionRequest
from mosaic.runtime.serve.completions import completions
from mosaic.runtime.serve.endpoint import Endpoint
from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.middleware import Keys, Recorded
from mosaic.runtime.serve.origins import Origins
from mosaic.runtime.serve.service import Service
from mosaic.runtime.serve.worker import State

PAGE = Path(__file__).with_name("page")
#: Its own policy is in the page; what only a header can say: no site may show it in a frame, and guess at no types.
PAGE_HEADERS = {"content-security-policy": "frame-ancestors 'none'", "x-content-type-options": "nosniff"}


def make_app(
    service: Service, *, keys: Sequence[str] = (), origins: Sequence[str] = (), hosts: Sequence[str] | None = None
) -> Starlette:
    """The application.

    `keys`: one of them is needed, if there are any. `origins`: web sites that may use it (CORS). `hosts`: the server's
    names beside localhost and addresses, where a browser must have found it by one of those; None: by any.
    """
    routes = _routes(service)
    paths = [route.path for route in routes if isinstance(route, Route)]
    middleware = [Middleware(Recorded, metrics=service.metrics, routes=paths)]
    if origins:
        allowed = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        middleware.append(allowed)
    middleware.append(Middleware(Origins, origins=origins, hosts=hosts))
    if keys:
        middleware.append(Middleware(Keys, keys=keys))

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.close()

    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _bug}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=running)
    app.router.redirect_slashes = False
    return app


def _routes(service: Service) -> list[BaseRoute]:
    begun = int(time.time())

    def about(name: str) -> dict[str, Any]:
        context = {"max_model_len": service.engine.context}
        return {"id": name, "object": "model", "created": begun, "owned_by": "mosaic", **context}

    async def health(_: Request) -> Response:
        state = service.worker.state
        return JSONResponse({"status": state}, 200 if state is State.READY else 503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [about(name) for name in service.names]})

    async def model(request: Request) -> Response:
        return JSONResponse(about(service.named(request.path_params["name"])))

    async def embeddings(_: Request) -> Response:
        raise ApiError(501, "this server makes no embeddings: its models generate text", code="unsupported")

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    return [
        Route("/", index),
        Mount("/page", _PageFiles(directory=PAGE)),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", Endpoint(service, ChatRequest, chat_completions), methods=["POST"]),
        Route("/v1/completions", Endpoint(service, CompletionRequest, completions), methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(PAGE_HEADERS)
        return response


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router has to say: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    problem = f"{error.detail}: {request.method} {request.url.path}"
    return ApiError(error.status_code, problem, code=codes.get(error.status_code), headers=error.headers).response()


async def _bug(_: Request, error: Exception) -> Response:
    """A fault of ours. Its traceback is in the log: the framework raises it again."""
    return ApiError(500, "an internal error; the server's log has the details", code="internal_error").response()
