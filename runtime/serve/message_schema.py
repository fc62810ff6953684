"""The messages in the body of /v1/chat/completions."""

from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, RootModel, model_validator

from mosaic.runtime.serve.schema import Asked, NullIsEmpty


class TextPart(Asked):
    """A part of a message; there are no other kinds here."""

    type: Literal["text"]
    text: str


class Parts(RootModel[Annotated[list[TextPart], FailFast()]]):
    """A content in parts."""


class CalledFunction(Asked):
    """A call the assistant made: arguments are JSON text."""

    name: str
    arguments: str


class MadeCall(Asked):
    """A tool call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Asked):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MadeCall], FailFast(), NullIsEmpty] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> Self:
        if self.content is None and self.role != "assistant":  # which may have said nothing: an answer cut short
            raise ValueError("a message without content")
        return self

    def as_dict(self) -> dict[str, Any]:
        """As templates expect it: what developers say, they know as the system's."""
        message = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            del message["tool_calls"]
        return message | {"role": "system"} if self.role == "developer" else message
