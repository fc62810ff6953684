"""From messages to the tokens of a prompt, and from the pieces of a reply to a message. No model is known here."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mosaic.format.errors import InputError
from mosaic.runtime.text.messages import Message
from mosaic.runtime.text.pieces import Piece, PieceKind, ToolCall
from mosaic.runtime.text.reasoning import OPEN
from mosaic.runtime.text.reply import ReplyReader
from mosaic.runtime.text.template import ChatTemplate
from mosaic.runtime.tokenizer import Tokenizer

#: Variables of a template that only `Dialogue` sets.
OWN_VARIABLES = frozenset({"self", "messages", "tools", "thinking", "at_most", "generate", "add_generation_prompt"})


@dataclass(frozen=True)
class ChatPrompt:
    """What asks a model for the assistant's next message."""

    tokens: list[int]
    boundaries: list[int]  # where messages begin, ascending, within the tokens; the last: the message asked for
    inside_reasoning: bool  # it ends in an open <think>
    text: str


class Dialogue:
    """The two directions of a chat with a model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        at_most: int | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """The prompt for some messages in the API's form. `thinking` None: as the template has it by default.

        `at_most`: of so many tokens; TooLongError, at once, for one so long that it is certain to have more.

        `variables` are handed to the template. InputError for messages it does not take, for what is not text, and for
        variables of OWN_VARIABLES; those that are parameters here, callers have to refuse.
        """
        if taken := variables.keys() & OWN_VARIABLES:
            raise InputError(
                "a variable of the chat template is not free",
                found=", ".join(sorted(taken)),
                expected="others, as the template knows them",
                remedy="leave it out",
            )
        if thinking is not None:
            variables["enable_thinking"] = thinking
        text = self._template.render(messages, tools, **variables)
        tokens = self._tokenizer.encode(text, at_most)
        past = self._template.render(messages, tools, generate=False, **variables)
        invitation = self._tokenizer.encode(text.removeprefix(past)) if text.startswith(past) else []
        return ChatPrompt(tokens, self._boundaries(tokens, invitation), text.rstrip().endswith(OPEN), text)

    def reader(
        self, prompt: ChatPrompt, stop: Sequence[str] = (), tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ReplyReader:
        """What reads the reply to a prompt. Calls are looked for if there are tools."""
        return ReplyReader(
            self._tokenizer,
            stop=stop,
            inside_reasoning=prompt.inside_reasoning,
            reasoning=self._template.reasoning,
            tool_format=self._template.tool_format if tools else None,
            tools=tools or (),
        )

    def _boundaries(self, tokens: list[int], invitation: list[int]) -> list[int]:
        """Where the invitation to answer begins, and earlier places of the token that it begins with."""
        last = len(tokens) - len(invitation)
        if not 0 < last < len(tokens) or tokens[last:] != invitation:
            return []
        mark = invitation[0]
        if not self._tokenizer.is_added(mark):
            return [last]
        return [position for position in range(1, last + 1) if tokens[position] == mark]


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The assistant's message that a reply amounts to, in the API's form, to be put into the history."""
    texts: dict[PieceKind, list[str]] = {kind: [] for kind in PieceKind}
    calls = []
    for piece in pieces:
        texts[piece.kind].append(piece.text)
        if piece.call is not None:
            calls.append(api_call(piece.call))
    reasoning, content = ("".join(texts[kind]) for kind in (PieceKind.REASONING, PieceKind.CONTENT))
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def api_call(call: ToolCall) -> dict[str, Any]:
    """A call in the API's form, with a new id."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
