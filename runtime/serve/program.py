"""The server as a process: from a socket to an exit code."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mosaic.runtime.serve.app import make_app
from mosaic.runtime.serve.origins import is_loopback
from mosaic.runtime.serve.server import LAST_WORDS, Server, listen, url
from mosaic.runtime.serve.service import Limits, Service
from mosaic.runtime.serve.worker import State, Worker

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

LOG = logging.getLogger("mosaic.serve")


def run(
    load: "Callable[[], Engine]",
    names: tuple[str, ...],
    *,
    host: str,
    port: int,
    limits: Limits,
    keys: Sequence[str],
    origins: Sequence[str],
    grace: float,
    log_level: str,
) -> None:
    """Serve until a signal comes. InputError if the engine cannot be loaded; exit code 1 if it failed later."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listening = listen(host, port)
    loopback = is_loopback(listening.getsockname()[0])
    if not (keys or loopback):
        print(f"note: whoever reaches {host} can use this server; --api-key asks for a key", file=sys.stderr)

    def watch(state: State) -> None:
        if state is State.READY:
            print(f"listening on {url(listening)}", flush=True)
        else:
            server.should_exit = True  # if it does not already

    def load_and_tell() -> "Engine":
        engine = load()
        if tuned := str(engine.tuned):
            LOG.info("tuned: %s", tuned)
        return engine

    worker = Worker(load_and_tell, watch)
    service = Service(worker, names, limits)
    app = make_app(service, keys=keys, origins=origins, hosts=[host] if loopback and not keys else None)
    server = Server(app, service, grace)
    server.run(sockets=[listening])
    stopped = worker.state is not State.LOADING and worker.stop(LAST_WORDS)
    if worker.refusal:
        raise worker.refusal
    if worker.state is State.FAILED:
        sys.exit(1)
    if not stopped:  # it is loading, or in a long step: there is nothing to be lost
        sys.stdout.flush()
        os._exit(0)
