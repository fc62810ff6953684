"""uvicorn around the application: a socket, two signals, and time for answers to end."""

import asyncio
import signal
import socket
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from mosaic.format.errors import InputError
from mosaic.runtime.serve.errors import unavailable
from mosaic.runtime.serve.protocol import ImpatientProtocol
from mosaic.runtime.serve.service import Service

TICK = 0.05  # seconds between two looks at the clock
LAST_WORDS = 5  # seconds for the engine to end its step, and for clients to be told that it did
SPARE_CONNECTIONS = 100  # beyond one for each request that may be in the house
FULL = unavailable("there are too many connections", "overloaded", retry_after=5, headers={"connection": "close"})


class Server(uvicorn.Server):
    """After SIGINT or SIGTERM: no new requests, and `grace` seconds for those that run; after a second one, none."""

    def __init__(self, app: ASGIApp, service: Service, grace: float) -> None:
        class Protocol(ImpatientProtocol):
            patience = service.limits.timeout

        limits = service.limits
        most = limits.parallel + limits.max_queue + SPARE_CONNECTIONS

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            full = scope["type"] == "http" and len(self.server_state.connections) > most
            await (FULL.response() if full else app)(scope, receive, send)

        config = uvicorn.Config(
            limited,
            http=Protocol,
            ws="none",
            lifespan="on",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.timeout),
            timeout_graceful_shutdown=int(grace) + LAST_WORDS,
        )
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._at_once = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. It is not raised again when all is done: that is a success. A third one is the system's."""
        if self.should_exit:
            self._at_once = True
            signal.signal(sig, signal.SIG_DFL)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs come to its end, or bring it about."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and not self._at_once:
            await asyncio.sleep(TICK)
        self._service.worker.ask_to_stop()  # which its clients are told
        while not self._at_once:
            await asyncio.sleep(TICK)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, and refuses to share its port. InputError if that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(
            "cannot listen there",
            found=f"{host} port {port}: {error.strerror or error}",
            remedy="choose another --host or --port",
        ) from error


def url(listening: socket.socket) -> str:
    """Where it listens, as a client writes it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
