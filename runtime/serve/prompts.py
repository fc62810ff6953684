"""The limits that every prompt meets before it goes to the engine, told as the API's clients expect it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mosaic.format.errors import InputError
from mosaic.runtime.serve.errors import ApiError, refused
from mosaic.runtime.tokenizer import TooLongError

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine

Made = TypeVar("Made")


def made(engine: "Engine", make: Callable[[], Made], param: str) -> Made:
    """What `make` makes of a text. ApiError for a text that it refuses."""
    try:
        return make()
    except TooLongError as error:
        raise _too_long(engine, f"more than {engine.context}", param) from error
    except InputError as error:
        raise refused(error, param) from error


def checked(engine: "Engine", tokens: list[int], param: str) -> list[int]:
    """The tokens of a prompt, if there are any, they exist, and they fit the context; else ApiError."""
    if not tokens:
        raise ApiError(400, f"{param}: the prompt is empty", param=param)
    if len(tokens) > engine.context:
        raise _too_long(engine, str(len(tokens)), param)
    if not 0 <= min(tokens) <= max(tokens) < engine.tokenizer.num_tokens:
        raise ApiError(400, f"{param}: token ids are from 0 to {engine.tokenizer.num_tokens - 1}", param=param)
    return tokens


def _too_long(engine: "Engine", found: str, param: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: the prompt has {found} tokens, and this model's context is {engine.context} tokens",
        param=param,
        code="context_length_exceeded",
    )
