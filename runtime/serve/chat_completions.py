"""/v1/chat/completions: messages in, a message out, whole or as it grows."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mosaic.runtime.request import Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.serve.answers import Choice, Delta
from mosaic.runtime.serve.chat_schema import ChatRequest
from mosaic.runtime.serve.constraint import constraint
from mosaic.runtime.serve.errors import ApiError
from mosaic.runtime.serve.job import Form, Job, Json
from mosaic.runtime.serve.logprobs import chat_logprobs
from mosaic.runtime.serve.prompts import checked, made
from mosaic.runtime.serve.service import Service
from mosaic.runtime.text.dialogue import ChatPrompt, api_call, message_of
from mosaic.runtime.text.reply import Piece, PieceKind

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine


def chat_completions(service: Service, asked: ChatRequest) -> Job:
    """The generations that a request amounts to: n for its prompt. ApiError for what cannot be."""
    model, engine = service.named(asked.model), service.engine
    sampling = asked.sampling(engine.defaults, engine.tokenizer.num_tokens)
    tools = asked.offered or None
    prompt = made(engine, lambda: _prompt(engine, asked), "messages")
    checked(engine, prompt.tokens, "messages")
    choices = [
        Choice(
            Request(
                prompt=prompt.tokens,
                sampling=sampling,
                seed=seed,
                max_tokens=asked.limit,
                stop_tokens=frozenset(asked.stop_token_ids),
                logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
                boundaries=prompt.boundaries,
            ),
            engine.dialogue.reader(prompt, asked.stop, tools),
            one_call=asked.one_call,
            again=index > 0,
        )
        for index, seed in enumerate(asked.seeds())
    ]
    wanted = constraint(asked, engine.template.tool_format, prompt.inside_reasoning)
    return Job(choices, _Form(engine, asked.logprobs, model), asked.stream, asked.with_usage, wanted)


def _prompt(engine: "Engine", asked: ChatRequest) -> ChatPrompt:
    tools = asked.offered or None
    if tools and engine.template.tool_format is None:
        raise ApiError(400, "tools: this model's chat template knows none", param="tools")
    messages = [message.as_dict() for message in asked.messages]
    return engine.dialogue.prompt(messages, tools, asked.thinking, engine.context, **asked.variables)


class _Form(Form):
    """A message, or what is new of one."""

    def __init__(self, engine: "Engine", logprobs: bool, model: str) -> None:
        super().__init__(model, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._tokenizer = engine.tokenizer
        self._wanted = logprobs
        self._begun: set[int] = set()
        self._calls: dict[int, int] = defaultdict(int)
        self._unsent: dict[int, list[Chosen]] = defaultdict(list)  # tokens whose text is still held back

    def choice(self, delta: Delta) -> Json:
        """A whole message."""
        return {
            "index": delta.index,
            "message": message_of(delta.pieces) | {"refusal": None},
            "logprobs": self._logprobs(delta.chosen),
            "finish_reason": delta.finish_reason,
        }

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The role, a chunk for each piece, the reason."""
        index = delta.index
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        self._unsent[index] += delta.chosen
        for piece in delta.pieces:
            yield self._chunk(index, _delta(piece, self._calls[index]))
            self._calls[index] += piece.kind is PieceKind.TOOL_CALL
        if delta.finish_reason:
            yield self._chunk(index, {}, delta.finish_reason)

    def _chunk(self, index: int, delta: Json, reason: str | None = None) -> Json:
        logprobs = self._logprobs(self._unsent.pop(index, []))
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, chosen: list[Chosen]) -> Json | None:
        return chat_logprobs(self._tokenizer, chosen) if self._wanted else None


def _delta(piece: Piece, calls: int) -> Json:
    """What a piece adds to a message that has so many calls."""
    if piece.call is not None:
        return {"tool_calls": [{"index": calls, **api_call(piece.call)}]}
    return {"reasoning_content" if piece.kind is PieceKind.REASONING else "content": piece.text}
