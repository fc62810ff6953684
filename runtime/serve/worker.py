"""The one thread that loads the engine and steps its scheduler, and the way in and out for the event loop.

Requests go in by a queue; tokens come out by calls into the loop, once a step. Nothing here waits for a client: tokens
that nobody fetches stay in their ticket, which holds no more of them than an answer can have.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import StrEnum
from queue import SimpleQueue
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.runtime.request import FinishReason, Generation, Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.serve.errors import ApiError, refused, unavailable

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.scheduler import Scheduler


class State(StrEnum):
    """Of the engine, as /health shows it."""

    LOADING = "loading"
    READY = "ok"
    STOPPED = "stopped"
    FAILED = "failed"


class Ticket:
    """A request in the hands of the worker: an asynchronous iterator over its tokens, as many as there are each time.

    It ends with the generation, whose figures may be read then. `close` gives the request up. Lives in the loop.
    """

    generation: Generation

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._tokens: list[Chosen] = []
        self._done = False
        self._closed = False
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self.accepted = asyncio.Event()

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> list[Chosen]:
        """One or more further tokens; ApiError if the engine gave up."""
        while not (self._tokens or self._done):
            self._news.clear()
            await self._news.wait()
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            return tokens
        if self._error:
            raise self._error
        raise StopAsyncIteration

    def close(self) -> None:
        """Free its place; nothing if it is over."""
        if not (self._done or self._closed):
            self._closed = True
            self._worker.give_up(self)

    def arrive(self, tokens: list[Chosen], done: bool, error: ApiError | None = None) -> None:
        """What the worker has for it."""
        self._tokens += tokens
        self._done, self._error = done, error
        self.accepted.set()
        self._news.set()

    async def wait_accepted(self) -> None:
        """Until the scheduler has it; ApiError if it is refused."""
        await self.accepted.wait()
        if self._error and not self._tokens:
            raise self._error


class Worker:
    """`load` makes the engine, in the worker's thread; `watch` is told of every state, in the loop."""

    def __init__(self, load: "Callable[[], Engine]", watch: Callable[[State], None] = lambda state: None) -> None:
        self._load = load
        self._watch = watch
        self._commands: SimpleQueue[tuple[Ticket, Request | None] | None] = SimpleQueue()
        self._running: list[Ticket] = []
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self.state = State.LOADING
        self.refusal: InputError | None = None  # why the engine could not be loaded

    @property
    def engine(self) -> "Engine":
        """The engine; ApiError while there is none to be used."""
        self.check()
        assert self._engine
        return self._engine

    def check(self) -> None:
        """ApiError while there is no engine to be used."""
        if self.state is State.LOADING:
            raise unavailable("the model is being loaded", "loading", retry_after=5)
        if self.state is not State.READY:
            raise unavailable("the engine has stopped", "stopped", retry_after=30)

    def start(self) -> None:
        """Begin to load. To be called in the loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, request: Request) -> Ticket:
        """Have a request answered. ApiError if it is refused."""
        ticket = Ticket(self)
        self.check()
        self._commands.put((ticket, request))
        self.check()  # raises if the thread has ended meanwhile: it may not look into the queue again
        try:
            await ticket.wait_accepted()
        except asyncio.CancelledError:
            ticket.close()
            raise
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """End a request."""
        self._commands.put((ticket, None))

    def ask_to_stop(self) -> None:
        """End the thread after the step it is in, and with it whatever runs."""
        self._commands.put(None)

    def stop(self, timeout: float) -> bool:
        """The same, waiting for it; whether that was done within so many seconds."""
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        end = State.FAILED
        try:
            self._engine = self._load()
            self._become(State.READY)
            self._serve(self._engine.scheduler)
            end = State.STOPPED
        except InputError as error:
            self.refusal = error
        finally:  # a bug shows its traceback: threading prints it
            self._become(end)
            self._leave()

    def _serve(self, scheduler: "Scheduler") -> None:
        busy = False
        while True:
            while not (busy and self._commands.empty()):
                command = self._commands.get()
                if command is None:
                    return
                self._obey(scheduler, *command)
                busy = True
            busy = scheduler.step()
            self._deliver()

    def _obey(self, scheduler: "Scheduler", ticket: Ticket, request: Request | None) -> None:
        if request is None:
            if ticket in self._running:
                scheduler.cancel(ticket.generation)
            return
        try:
            ticket.generation = scheduler.submit(request)
        except InputError as error:
            self._tell(ticket.arrive, [], True, refused(error))
            return
        self._running.append(ticket)
        self._tell(ticket.accepted.set)

    def _deliver(self) -> None:
        """Hand out what the last step brought."""
        news = []
        for ticket in self._running:
            generation = ticket.generation
            done = generation.finish_reason is not None
            tokens = generation.take()
            if tokens or done:
                news.append((ticket, tokens, done, _error(generation)))
        if news:
            self._running = [ticket for ticket in self._running if ticket.generation.finish_reason is None]
            self._tell(_hand_out, news)

    def _leave(self) -> None:
        """Tell everyone who waits that nothing more will come."""
        error = unavailable("the engine has stopped", "stopped", retry_after=30)
        waiting = list(self._running)
        while not self._commands.empty():
            command = self._commands.get()
            if command and command[1] is not None:
                waiting.append(command[0])
        for ticket in waiting:
            self._tell(ticket.arrive, [], True, error)

    def _become(self, state: State) -> None:
        self.state = state
        self._tell(self._watch, state)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)


def _hand_out(news: list[tuple[Ticket, list[Chosen], bool, ApiError | None]]) -> None:
    for ticket, tokens, done, error in news:
        ticket.arrive(tokens, done, error)


def _error(generation: Generation) -> ApiError | None:
    if generation.error and generation.finish_reason is FinishReason.REFUSED:  # by its grammar, say: not to be retried
        return refused(generation.error)
    if generation.error:
        return ApiError(500, f"the engine could not go on: {generation.error.problem}", code="engine_error")
    if generation.finish_reason is FinishReason.CANCELLED:
        return unavailable("the answer was cancelled", "stopped", retry_after=30)
    return None
