"""What a body amounts to: choices to be answered, and the form in which the API has them."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mosaic.runtime.serve.answers import Choice, Delta, Deltas, answers, together
from mosaic.runtime.serve.constraint import Constraint
from mosaic.runtime.serve.service import Service
from mosaic.runtime.serve.stream import to_json_aside
from mosaic.runtime.serve.tally import Tally

Json = dict[str, Any]


class Form(ABC):
    """The API's objects for one request. Holds as little of the request as it can: an answer may take hours."""

    def __init__(self, model: str, prefix: str, kind: str, chunk_kind: str) -> None:
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.head = head | {"object": kind}
        self.chunk_head = head | {"object": chunk_kind}

    @abstractmethod
    def choice(self, delta: Delta) -> Json:
        """A choice, of all its deltas together."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterable[Json]:
        """What a stream says of a choice; none of them long."""


@dataclass(frozen=True)
class Job:
    """A request that can be answered. `constraint`: what its choices have yet to get their masks of."""

    choices: list[Choice]
    form: Form
    stream: bool
    with_usage: bool  # at the end of a stream
    constraint: Constraint | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; that of several choices counts once."""
        return sum(len(choice.request.prompt) for choice in self.choices if not choice.again)

    async def whole(self, service: Service, tally: Tally) -> bytes:
        """The answer, as JSON."""
        deltas = await together(self._deltas(service, tally))

        def made() -> bytes:
            choices = [self.form.choice(delta) for delta in deltas]
            return to_json_aside({**self.form.head, "choices": choices, "usage": tally.usage()})

        return await service.prepare(made, long=self.choices[0].request.logprobs is not None)

    async def events(self, service: Service, tally: Tally) -> AsyncGenerator[Json, None]:
        """The answer in chunks, as it comes; the first one of a choice is empty."""
        head = self.form.chunk_head
        no_usage = {"usage": None} if self.with_usage else {}
        async with aclosing(self._deltas(service, tally)) as deltas:
            async for delta in deltas:
                for choice in self.form.chunks(delta):
                    yield {**head, "choices": [choice], **no_usage}
        if self.with_usage:
            yield {**head, "choices": [], "usage": tally.usage()}

    def _deltas(self, service: Service, tally: Tally) -> Deltas:
        return answers(service.worker, self.choices, service.limits.parallel, tally, service.metrics)
