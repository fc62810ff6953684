"""/v1/completions: text or tokens in, what follows them out, and on demand how likely each token was."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mosaic.format.errors import InputError
from mosaic.runtime.request import Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.serve.answers import Choice, Delta, Deltas, answers
from mosaic.runtime.serve.completion_schema import CompletionRequest, Prompt
from mosaic.runtime.serve.errors import refused
from mosaic.runtime.serve.logprobs import CompletionLogprobs
from mosaic.runtime.serve.prompts import checked
from mosaic.runtime.serve.schema import parse
from mosaic.runtime.serve.service import Service
from mosaic.runtime.serve.tally import Tally
from mosaic.runtime.text.reply import ReplyReader

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

Json = dict[str, Any]


async def completions(service: Service, body: object, tally: Tally) -> Json | AsyncGenerator[Json, None]:
    """An answer, or its events. ApiError for what cannot be."""
    asked = parse(CompletionRequest, body)
    model = service.named(asked.model)
    engine = service.engine
    choices = await service.prepare(lambda: _choices(engine, asked))
    tally.prompt = sum(len(choice.request.prompt) for choice in choices if not choice.again)
    deltas = answers(service.worker, choices, service.limits.parallel, tally, service.metrics)
    form = _Form(engine, asked, model)
    return form.events(deltas, tally) if asked.stream else await form.whole(deltas, tally)


def _choices(engine: "Engine", asked: CompletionRequest) -> list[Choice]:
    """The generations that a request amounts to: n for each prompt."""
    sampling = asked.sampling(engine.defaults, engine.tokenizer.num_tokens)
    choices = []
    for prompt in asked.prompt:
        tokens = checked(engine, _tokens(engine, prompt), "prompt")
        for index, seed in enumerate(asked.seeds()):
            request = Request(
                prompt=tokens,
                sampling=sampling,
                seed=seed,
                max_tokens=asked.max_tokens,
                stop_tokens=frozenset(asked.stop_token_ids),
                logprobs=asked.logprobs,
                score_prompt=asked.echo and asked.logprobs is not None,
            )
            choices.append(Choice(request, ReplyReader(engine.tokenizer, stop=asked.stop), again=index > 0))
    return choices


def _tokens(engine: "Engine", prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    try:
        return engine.tokenizer.encode(prompt)
    except InputError as error:
        raise refused(error, "prompt") from error


class _Form:
    """The API's objects for one request. A chunk of a stream has the form of the whole answer."""

    def __init__(self, engine: "Engine", asked: CompletionRequest, model: str) -> None:
        self._tokenizer = engine.tokenizer
        self._asked = asked
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model
        }  # fmt: skip
        self._scores: dict[int, CompletionLogprobs] = {}

    async def whole(self, deltas: Deltas, tally: Tally) -> Json:
        """All choices, complete."""
        parts: dict[int, list[Json]] = defaultdict(list)
        async for delta in deltas:
            parts[delta.index].append(self._choice(delta))
        choices = [_joined(parts[index]) for index in sorted(parts)]
        return {**self._head, "choices": choices, "usage": tally.usage()}

    async def events(self, deltas: Deltas, tally: Tally) -> AsyncGenerator[Json, None]:
        """Chunks, as they come; the first one of a choice is empty."""
        options = self._asked.stream_options
        with_usage = {"usage": None} if options and options.include_usage else {}
        async with aclosing(deltas):
            async for delta in deltas:
                yield {**self._head, "choices": [self._choice(delta)], **with_usage}
        if with_usage:
            yield {**self._head, "choices": [], "usage": tally.usage()}

    def _choice(self, delta: Delta) -> Json:
        """What is new of a choice; the prompt, if it is wanted, with the first of it."""
        index, generation, echo = delta.index, delta.generation, ""
        tokens = [chosen.token for chosen in delta.chosen]
        known: list[Chosen | None] = [*delta.chosen]
        if delta.finish_reason and generation.ended_by:
            tokens.append(generation.ended_by.token)
            known.append(generation.ended_by)
        if delta.begun and index not in self._scores:
            self._scores[index] = CompletionLogprobs(self._tokenizer)
            if self._asked.echo:
                prompt = self._asked.prompt[index // self._asked.n]
                echo = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
                tokens[:0] = generation.request.prompt
                known[:0] = generation.prompt_scores
        wanted = self._asked.logprobs is not None and tokens
        return {
            "index": index,
            "text": echo + "".join(piece.text for piece in delta.pieces),
            "logprobs": self._scores[index].of(tokens, known) if wanted else None,
            "finish_reason": delta.finish_reason,
        }


def _joined(parts: list[Json]) -> Json:
    """A choice of its parts."""
    scores = [part["logprobs"] for part in parts if part["logprobs"]]
    logprobs = {name: [value for each in scores for value in each[name]] for name in scores[0]} if scores else None
    return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}
