"""/v1/chat/completions: messages in, a message out, whole or as it grows."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mosaic.format.errors import InputError
from mosaic.runtime.request import Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.serve.answers import Choice, Deltas, answers
from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.serve.constraint import grammar
from mosaic.runtime.serve.errors import ApiError, refused
from mosaic.runtime.serve.logprobs import chat_logprobs
from mosaic.runtime.serve.prompts import checked
from mosaic.runtime.serve.schema import parse
from mosaic.runtime.serve.service import Service
from mosaic.runtime.serve.tally import Tally
from mosaic.runtime.text.dialogue import api_call, message_of
from mosaic.runtime.text.reply import Piece, PieceKind

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

Json = dict[str, Any]


async def chat_completions(service: Service, body: object, tally: Tally) -> Json | AsyncGenerator[Json, None]:
    """An answer, or its events. ApiError for what cannot be."""
    asked = parse(ChatRequest, body)
    model = service.named(asked.model)
    engine = service.engine
    choices = await service.prepare(lambda: _choices(engine, asked))
    tally.prompt = len(choices[0].request.prompt)
    deltas = answers(service.worker, choices, service.limits.parallel, tally, service.metrics)
    form = _Form(engine, asked, model)
    return form.events(deltas, tally) if asked.stream else await form.whole(deltas, tally)


def _choices(engine: "Engine", asked: ChatRequest) -> list[Choice]:
    """The generations that a request amounts to."""
    tools = asked.offered or None
    messages = [message.as_dict() for message in asked.messages]
    try:
        if tools and engine.template.tool_format is None:
            raise ApiError(400, "tools: this model's chat template knows none", param="tools")
        prompt = engine.dialogue.prompt(messages, tools, asked.thinking, **asked.variables)
    except InputError as error:
        raise refused(error, "messages") from error
    checked(engine, prompt.tokens, "messages")
    try:
        form = grammar(asked, engine.template.tool_format, prompt.inside_reasoning)
        masks = [None if form is None else engine.grammars.lark(form) for _ in range(asked.n)]
    except InputError as error:
        raise refused(error, "tools" if asked.forced else "response_format") from error
    sampling = asked.sampling(engine.defaults, engine.tokenizer.num_tokens)
    return [
        Choice(
            Request(
                prompt=prompt.tokens,
                sampling=sampling,
                seed=seed,
                max_tokens=asked.limit,
                stop_tokens=frozenset(asked.stop_token_ids),
                logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
                mask=mask,
                boundaries=prompt.boundaries,
            ),
            engine.dialogue.reader(prompt, asked.stop, tools),
            one_call=asked.one_call,
            again=index > 0,
        )
        for index, (seed, mask) in enumerate(zip(asked.seeds(), masks, strict=True))
    ]


class _Form:
    """The API's objects for one request."""

    def __init__(self, engine: "Engine", asked: ChatRequest, model: str) -> None:
        self._tokenizer = engine.tokenizer
        self._asked = asked
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, deltas: Deltas, tally: Tally) -> Json:
        """All choices, complete."""
        pieces: dict[int, list[Piece]] = defaultdict(list)
        chosen: dict[int, list[Chosen]] = defaultdict(list)
        reasons: dict[int, str | None] = {}
        async for delta in deltas:
            pieces[delta.index] += delta.pieces
            chosen[delta.index] += delta.chosen
            reasons[delta.index] = delta.finish_reason
        choices = [
            {
                "index": index,
                "message": message_of(pieces[index]) | {"refusal": None},
                "logprobs": self._logprobs(chosen[index]),
                "finish_reason": reasons[index],
            }
            for index in sorted(reasons)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": tally.usage()}

    async def events(self, deltas: Deltas, tally: Tally) -> AsyncGenerator[Json, None]:
        """Chunks, as they come."""
        calls: dict[int, int] = defaultdict(int)
        unsent: dict[int, list[Chosen]] = defaultdict(list)  # tokens whose text is still held back
        options = self._asked.stream_options
        with_usage = {"usage": None} if options and options.include_usage else {}

        def chunk(index: int, delta: Json, reason: str | None = None) -> Json:
            logprobs = self._logprobs(unsent.pop(index, []))
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **with_usage}

        begun = set()
        async with aclosing(deltas):
            async for delta in deltas:
                index = delta.index
                if index not in begun:
                    begun.add(index)
                    yield chunk(index, {"role": "assistant", "content": ""})
                unsent[index] += delta.chosen
                for piece in delta.pieces:
                    yield chunk(index, _delta(piece, calls[index]))
                    calls[index] += piece.kind is PieceKind.TOOL_CALL
                if delta.finish_reason:
                    yield chunk(index, {}, delta.finish_reason)
        if with_usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": tally.usage()}

    def _logprobs(self, chosen: list[Chosen]) -> Json | None:
        return chat_logprobs(self._tokenizer, chosen) if self._asked.logprobs else None


def _delta(piece: Piece, calls: int) -> Json:
    """What a piece adds to a message that has so many calls."""
    if piece.call is not None:
        return {"tool_calls": [{"index": calls, **api_call(piece.call)}]}
    return {"reasoning_content" if piece.kind is PieceKind.REASONING else "content": piece.text}
