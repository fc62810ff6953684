"""The body of /v1/chat/completions."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, FailFast, Field, model_validator

from mosaic.runtime.serve.message_schema import Message
from mosaic.runtime.serve.schema import MOST_LOGPROBS, Asked, Common, Few, Flag, MinusOneIsNone, NullIsEmpty
from mosaic.runtime.text.dialogue import OWN_VARIABLES


class Function(Asked):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Asked):
    """Something that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Asked):
    """Of a function that is offered."""

    name: str


class NamedTool(Asked):
    """The one tool to be used."""

    type: Literal["function"]
    function: FunctionName


class SchemaFormat(Asked):
    """A JSON schema, its name and so on."""

    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Asked):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _a_schema_is_given(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema")
        return self


class ChatRequest(Common):
    """What a client may ask of a conversation."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[Annotated[int, Field(ge=1)] | None, MinusOneIsNone] = None
    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, MinusOneIsNone] = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], FailFast(), Field(max_length=512), NullIsEmpty, Few] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[ResponseFormat | None, Few] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Few] = None

    @model_validator(mode="after")
    def _parameters_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.forced and not self.tools:
            raise ValueError("tool_choice: only with tools")
        if isinstance(self.tool_choice, NamedTool) and not self.offered:
            raise ValueError("tool_choice: none of the tools has this name")
        if self.forced and self.schema_wanted is not None:
            raise ValueError("response_format: not together with a tool_choice that asks for a call")
        if taken := OWN_VARIABLES & set(self._variables):
            raise ValueError(f"chat_template_kwargs: {min(taken)} is given otherwise")
        if not isinstance(self._variables.get("enable_thinking"), bool | None):
            raise ValueError("chat_template_kwargs: enable_thinking is true or false")
        return self

    @property
    def forced(self) -> bool:
        """Whether a tool has to be called."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def one_call(self) -> bool:
        """Whether one call is all that is wanted."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the answer has to be valid for; None: it may be any text."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "json_object" or self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.content

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that may be called, as they were given."""
        if self.tool_choice == "none":
            return []
        only = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools if only in (None, tool.function.name)]

    @property
    def variables(self) -> dict[str, Any]:
        """For the template, beside the conversation."""
        return {name: value for name, value in self._variables.items() if name != "enable_thinking"}

    @property
    def _variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def thinking(self) -> bool | None:
        """Whether to think first; None: as the template does by itself."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(wanted := self._variables.get("enable_thinking"), bool):
            return wanted
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
