"""One HTTP request's generations, from tokens to pieces of replies. Knows neither HTTP nor the API's objects."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from mosaic.runtime.request import Generation, Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.serve.metrics import Metrics
from mosaic.runtime.serve.tally import Tally
from mosaic.runtime.serve.worker import Worker
from mosaic.runtime.text.reply import Piece, PieceKind, ReplyReader


@dataclass(frozen=True)
class Choice:
    """One generation that was asked for."""

    request: Request
    reader: ReplyReader
    one_call: bool = False  # it ends with its first tool call
    again: bool = False  # the prompt is that of the choice before, and begins when that one's has been read


@dataclass(frozen=True)
class Delta:
    """What is new of a choice. Its first one is empty: the engine has accepted it; its last one has a reason.

    Nothing of the generation's end is to be read from the generation: it may run on after a stop string.
    """

    index: int
    generation: Generation
    pieces: list[Piece] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)
    finish_reason: str | None = None
    ended_by: Chosen | None = None  # the stop token, where one ended the answer

    @property
    def begun(self) -> bool:
        """Whether the prompt has been read."""
        return bool(self.chosen or self.finish_reason)

    def then(self, later: "Delta") -> "Delta":
        """Both as one. Takes over this one's lists."""
        self.pieces.extend(later.pieces)
        self.chosen.extend(later.chosen)
        return replace(later, pieces=self.pieces, chosen=self.chosen)


Deltas = AsyncGenerator[Delta, None]


async def answers(worker: Worker, choices: Sequence[Choice], at_once: int, tally: Tally, metrics: Metrics) -> Deltas:
    """All choices, as they advance; no more than so many of them at a time. Closing it gives up what is not done."""
    sources = [_answer(worker, index, choice, tally, metrics) for index, choice in enumerate(choices)]
    started, unread = 0, -1  # how many, and the one whose prompt is being read
    pending: dict[asyncio.Task[Delta | None], Deltas] = {}
    try:
        while started < len(sources) or pending:
            while started < len(sources) and len(pending) < at_once and not (choices[started].again and unread >= 0):
                if not choices[started].again:
                    unread = started
                pending[asyncio.create_task(_next(sources[started]))] = sources[started]
                started += 1
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = pending.pop(task)
                if (delta := task.result()) is None:
                    continue
                pending[asyncio.create_task(_next(source))] = source
                if delta.begun and delta.index == unread:
                    unread = -1
                yield delta
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def together(deltas: Deltas) -> list[Delta]:
    """All deltas of each choice as one, by index."""
    found: dict[int, Delta] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            known = found.get(delta.index)
            found[delta.index] = known.then(delta) if known else delta
    return [found[index] for index in sorted(found)]


async def _next(source: Deltas) -> Delta | None:
    return await anext(source, None)


async def _answer(worker: Worker, index: int, choice: Choice, tally: Tally, metrics: Metrics) -> Deltas:
    pace = metrics.pace()
    ticket = await worker.submit(choice.request)
    generation = ticket.generation
    called = over = False
    try:
        yield Delta(index, generation)
        async for tokens in ticket:
            pace.arrived(len(tokens))
            delta = Delta(index, generation)
            for chosen in tokens:
                pieces = choice.reader.push(chosen.token)
                delta.chosen.append(chosen)
                delta.pieces.extend(pieces)
                called = called or any(piece.kind is PieceKind.TOOL_CALL for piece in pieces)
                over = choice.reader.stopped or (called and choice.one_call)
                if over:
                    break
            tally.completion += len(delta.chosen)
            yield delta
            if over:
                break
        rest = [] if over else choice.reader.finish()
        called = called or any(piece.kind is PieceKind.TOOL_CALL for piece in rest)
        ended_by = None if over else generation.ended_by
        whole = over or choice.reader.stopped or ended_by is not None
        tally.finish_reason = "length" if not whole else "tool_calls" if called else "stop"
        yield Delta(index, generation, rest, finish_reason=tally.finish_reason, ended_by=ended_by)
    finally:
        ticket.close()
        tally.cached += 0 if choice.again else generation.stats.reused_tokens
