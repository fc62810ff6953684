"""What the endpoints share: the engine behind its worker, the names it is known by, and the limits."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mosaic.runtime.serve.errors import ApiError, unavailable
from mosaic.runtime.serve.metrics import Metrics, Sample
from mosaic.runtime.serve.worker import State, Worker

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

Result = TypeVar("Result")
THREADS = 2  # that prepare short requests, and as many for long ones


@dataclass(frozen=True)
class Limits:
    """How much is taken on. `parallel`: sequences in work; `max_queue`: requests beyond them that may wait."""

    parallel: int = 1
    max_queue: int = 64
    max_body: int = 4 << 20  # bytes
    timeout: float = 60.0  # seconds for a client to send its request, or to take anything of its answer
    keep_alive: float = 10.0  # seconds without a token after which a stream shows that it lives


class Service:
    """`names`: of the model; the first one is the one it calls itself."""

    def __init__(self, worker: Worker, names: tuple[str, ...], limits: Limits) -> None:
        self.worker = worker
        self.names = names
        self.limits = limits
        self.metrics = Metrics(self._sample)
        self._admitted = 0
        # Long prompts take seconds to be tokenised: short ones do not wait for them. Grammars go one at a time.
        self._short, self._long, self._alone = (
            ThreadPoolExecutor(threads, thread_name_prefix=name)
            for threads, name in ((THREADS, "short"), (THREADS, "long"), (1, "grammar"))
        )

    @property
    def engine(self) -> "Engine":
        """ApiError while there is none."""
        return self.worker.engine

    def named(self, name: str | None) -> str:
        """The name to answer by; ApiError if it is not one of ours. None: the model there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return name

    async def prepare(self, work: Callable[[], Result], *, long: bool) -> Result:
        """The result of something that would hold up the event loop; of something `long`, in a thread of these."""
        return await asyncio.get_running_loop().run_in_executor(self._long if long else self._short, work)

    async def prepare_alone(self, work: Callable[[], Result]) -> Result:
        """The same for what only one thread may do: grammars."""
        return await asyncio.get_running_loop().run_in_executor(self._alone, work)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """One request in the house; ApiError if it is full."""
        if self._admitted >= self.limits.parallel + self.limits.max_queue:
            raise unavailable("too many requests are waiting", "overloaded", retry_after=5)
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    def close(self) -> None:
        """Nothing more is to be prepared."""
        for threads in (self._short, self._long, self._alone):
            threads.shutdown(wait=False, cancel_futures=True)

    def _sample(self) -> Sample | None:
        if self.worker.state is not State.READY:
            return None
        scheduler = self.engine.scheduler
        traffic, cache = scheduler.traffic, scheduler.cache
        return Sample(
            active=scheduler.active,
            waiting=scheduler.waiting,
            cached_states=len(cache),
            cached_state_bytes=cache.nbytes,
            expert_hits=traffic.hits,
            expert_misses=traffic.misses,
            disk_bytes=traffic.disk_bytes,
            device_expert_hits=traffic.device_hits,
            device_bytes=traffic.device_bytes,
        )
