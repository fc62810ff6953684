"""/v1/completions: text or tokens in, what follows them out, and on demand how likely each token was."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mosaic.runtime.request import Generation, Request
from mosaic.runtime.serve.answers import Choice, Delta
from mosaic.runtime.serve.completion_schema import CompletionRequest, Prompt
from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.job import Form, Job, Json
from mosaic.runtime.serve.logprobs import CompletionLogprobs, Scores
from mosaic.runtime.serve.prompts import checked, made
from mosaic.runtime.serve.service import Service
from mosaic.runtime.text.reply import ReplyReader

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

MOST_SCORES = 1_000_000  # log-probabilities of prompts in one answer: some 200 bytes each, and again in JSON


def completions(service: Service, asked: CompletionRequest) -> Job:
    """The generations that a request amounts to: n for each prompt. ApiError for what cannot be."""
    model, engine = service.named(asked.model), service.engine
    sampling = asked.sampling(engine.defaults, engine.tokenizer.num_tokens)
    prompts = [checked(engine, _tokens(engine, prompt), "prompt") for prompt in asked.prompt]
    scored = asked.echo and asked.logprobs is not None
    if scored and sum(map(len, prompts)) * (1 + (asked.logprobs or 0)) > MOST_SCORES:
        problem = f"more than {MOST_SCORES:,} of prompts: ask for fewer, or for fewer prompts at a time"
        raise ApiError(400, f"logprobs: {problem}", param="logprobs")
    choices = [
        Choice(
            Request(
                prompt=tokens,
                sampling=sampling,
                seed=seed,
                max_tokens=asked.max_tokens,
                stop_tokens=frozenset(asked.stop_token_ids),
                logprobs=asked.logprobs,
                score_prompt=scored and index == 0,
            ),
            ReplyReader(engine.tokenizer, stop=asked.stop),
            again=index > 0,
        )
        for tokens in prompts
        for index, seed in enumerate(asked.seeds())
    ]
    return Job(choices, _Form(engine, asked, model), asked.stream, asked.with_usage)


def _tokens(engine: "Engine", prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return made(engine, lambda: engine.tokenizer.encode(prompt, engine.context), "prompt")


class _Form(Form):
    """A chunk of a stream has the form of a whole choice."""

    def __init__(self, engine: "Engine", asked: CompletionRequest, model: str) -> None:
        super().__init__(model, "cmpl", "text_completion", "text_completion")
        self._tokenizer = engine.tokenizer
        self._n = asked.n
        self._logprobs = asked.logprobs is not None
        self._echoed = asked.prompt if asked.echo else None
        self._read: dict[int, Generation] = {}  # by prompt, the one that has read, and scored, it
        self._scores: dict[int, CompletionLogprobs] = {}

    def choice(self, delta: Delta) -> Json:
        """All of its parts as one."""
        parts = list(self.chunks(delta))
        scores = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {name: [value for each in scores for value in each[name]] for name in scores[0]} if scores else None
        return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The prompt, if it is wanted, before the first of what is new."""
        if delta.begun and delta.index not in self._scores:
            self._scores[delta.index] = CompletionLogprobs(self._tokenizer)
            if self._echoed is not None:
                yield from self._prompt(delta, self._echoed[delta.index // self._n])
        chosen = [*delta.chosen, *([delta.ended_by] if delta.ended_by else [])]
        scores = self._scores[delta.index].of(chosen) if self._logprobs and chosen else None
        text = "".join(piece.text for piece in delta.pieces)
        yield _part(delta.index, text, scores, delta.finish_reason)

    def _prompt(self, delta: Delta, prompt: Prompt) -> Iterator[Json]:
        """Its text, and its tokens' scores in parts."""
        read = self._read.setdefault(delta.index // self._n, delta.generation)
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, special=True)
        if not self._logprobs:
            yield _part(delta.index, text)
            return
        for scores in self._scores[delta.index].of_prompt(text, read.request.prompt, read.prompt_scores):
            yield _part(delta.index, text, scores)
            text = ""


def _part(index: int, text: str, logprobs: Scores | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
