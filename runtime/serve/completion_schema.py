"""The body of /v1/completions."""

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mosaic.runtime.serve.schema import MOST_LOGPROBS, Choices, Common, Flag

MOST_PROMPTS = 256
SHORT = 16  # tokens of an answer where nothing else is asked: the API's own default

Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """The four forms of a prompt, as a list of texts and token lists. By hand: a list may be a long one."""
    many = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(many) > MOST_PROMPTS:
        raise ValueError(f"more than {MOST_PROMPTS} prompts")
    found: list[Prompt] = []
    for prompt in many:
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))):
            raise ValueError("a prompt is a text, a list of texts, a list of token ids, or a list of those")
        if not prompt:
            raise ValueError("a prompt is empty")
        found.append(prompt)
    return found


def _limit(value: object) -> object:
    return SHORT if value is None else None if value == -1 else value


class CompletionRequest(Common):
    """What a client may ask of a text to be continued."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_limit)] = SHORT
    echo: Flag = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Choices | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _parameters_agree(self) -> Self:
        if self.suffix:
            raise ValueError("suffix: this server does not fill in the middle")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: only the same as n")
        return self
