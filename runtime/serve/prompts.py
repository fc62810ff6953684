"""The limits that every prompt meets before it goes to the engine, told as the API's clients expect it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.runtime.serve.errors import ApiError

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine


def checked(engine: "Engine", tokens: Sequence[int], param: str) -> Sequence[int]:
    """The tokens of a prompt, if there are any, they exist, and they fit the context; else ApiError."""
    if not tokens:
        raise ApiError(400, f"{param}: the prompt is empty", param=param)
    if len(tokens) > engine.context:
        raise ApiError(
            400,
            f"{param}: the prompt has {len(tokens)} tokens, and this model's context is {engine.context} tokens",
            param=param,
            code="context_length_exceeded",
        )
    if not 0 <= min(tokens) <= max(tokens) < engine.tokenizer.num_tokens:
        raise ApiError(400, f"{param}: token ids are from 0 to {engine.tokenizer.num_tokens - 1}", param=param)
    return tokens
