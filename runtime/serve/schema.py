"""What all requests have in common, and how a body that does not fit is refused: the first fault, by its place.

Types are strict (no "1" for 1), null is the same as absent, and what is not known is ignored, unless it asks for
something that a client would miss.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from mosaic.runtime.sampling import Sampling
from mosaic.runtime.serve.errors import ApiError

MOST_LOGPROBS = 20
MOST_CHOICES = 16
MOST_BIASES = 1000
MOST_VALUES = 20_000  # in tools, schemas and the like
#: Parameters of other servers and other times that would change the answer: not to be ignored.
REFUSED = {
    **dict.fromkeys(("functions", "function_call"), "use tools and tool_choice"),
    **dict.fromkeys(
        ("grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        "use response_format",
    ),
    **dict.fromkeys(("audio", "web_search_options"), "this server answers in text only"),
}


class Asked(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


#: null is the same as absent.
NullIsEmpty = BeforeValidator(lambda value: [] if value is None else value)
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES), BeforeValidator(lambda value: 1 if value is None else value)]
#: -1 is what some clients send for no limit.
MinusOneIsNone = BeforeValidator(lambda value: None if value == -1 else value)
StopText = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _listed(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


def _stops(value: object) -> object:
    """Clients send the empty string for none."""
    listed = _listed(value)
    return [stop for stop in listed if stop != ""] if isinstance(listed, list) else listed


def _few_biases(value: object) -> object:
    """Checked first: a long one would have a fault for each of its members."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"more than {MOST_BIASES} tokens")
    return {} if value is None else value


def _few(value: object) -> object:
    """Something of any form, which is kept as long as its answer takes."""
    left, found = MOST_VALUES, [value]
    while found:
        inner = found.pop()
        members = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        left -= len(members)
        if left < 0:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        found.extend(members)
    return value


Few = BeforeValidator(_few)


class StreamOptions(Asked):
    """How a stream looks."""

    include_usage: Flag = False


class Common(Asked):
    """What both endpoints take."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Choices = 1
    stop: Annotated[list[StopText], FailFast(), Field(max_length=64), BeforeValidator(_stops)] = []
    stop_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=64), BeforeValidator(_listed)] = []
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] = {}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: Sampling, num_tokens: int) -> Sampling:
        """What was asked, and the model's defaults for the rest. ApiError for biases of ids that are no tokens."""
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # -1 elsewhere stands for 0: no cut
        if self.logit_bias:
            given["logit_bias"] = {_token(key, num_tokens): bias for key, bias in self.logit_bias.items()}
        known = {name: getattr(defaults, name) for name in Sampling.__dataclass_fields__}
        return Sampling(**(known | given))

    def seeds(self) -> list[int | None]:
        """One for each choice: the same request with the same seed has the same answers."""
        return [None if self.seed is None else (self.seed + index) % (1 << 64) for index in range(self.n)]


Model = TypeVar("Model", bound=Common)


def parse(model: type[Model], body: object) -> Model:
    """The request; ApiError (400, with `param`) for the first thing that is wrong with it."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    for name, remedy in REFUSED.items():
        if body.get(name):
            raise ApiError(400, f"{name} is not supported: {remedy}", param=name, code="unsupported_parameter")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        # Of the ways to read a value, tell what is wrong with the one that came furthest.
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        place, fault = max(((_place(fault, body), fault) for fault in faults), key=lambda found: len(found[0]))
    message = fault["msg"].removeprefix("Value error, ")
    if not place:  # a rule about several parameters begins with the one to change
        place = [message.partition(":")[0]]
        message = message.partition(": ")[2]
    param = ".".join(map(str, place))
    raise ApiError(400, f"{param}: {message}", param=param)


def _place(fault: ErrorDetails, body: object) -> list[str | int]:
    """Where in the body a fault is: pydantic's place, without the names of its own alternatives."""
    place: list[str | int] = []
    for step in fault["loc"]:
        if isinstance(body, dict) and (step in body or (fault["type"] == "missing" and step == fault["loc"][-1])):
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            body = body[step]
        else:
            continue
        place.append(step)
    return place


def _token(key: str, num_tokens: int) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < num_tokens):
        raise ApiError(400, f"logit_bias: keys are token ids from 0 to {num_tokens - 1}", param="logit_bias")
    return int(key)
