"""A server in this process: uvicorn in a thread, on a port of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mosaic.runtime.serve.app import make_app
from mosaic.runtime.serve.server import Server, listen, url
from mosaic.runtime.serve.service import Limits, Service
from mosaic.runtime.serve.worker import State, Worker

PATIENCE = 30.0  # seconds for what takes milliseconds


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    service: Service
    server: Server

    def wait(self, condition: Callable[[], object]) -> None:
        """Until something is so; an error if it does not become so."""
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.005)):
            if condition():
                return
            pause.wait(0.005)
        raise AssertionError("it did not happen")


@contextmanager
def serving(
    load: Callable[[], Any], *, limits: Limits | None = None, grace: float = 1.0, ready: bool = True, **options: Any
) -> Iterator[Served]:
    """A server of the engine that `load` makes; `options` are those of make_app. Waits for the engine if `ready`."""
    states: list[State] = []
    worker = Worker(load, states.append)
    service = Service(worker, ("tiny", "other-name"), limits or Limits(parallel=2))
    server = Server(make_app(service, **options), service, grace)
    listening = listen("127.0.0.1", 0)
    served = Served(url(listening), listening.getsockname()[1], service, server)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        served.wait(lambda: server.started and (states or not ready))
        yield served
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert worker.stop(PATIENCE)
        assert not thread.is_alive()
