"""What is asked of a model, and what has become of it so far. Holds no state of the model and computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mosaic.format.errors import InputError
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.sampler import Chosen, TokenMask
from mosaic.runtime.sampling import Sampling

if TYPE_CHECKING:
    from mosaic.runtime.speeds import Speeds


MOST_LOGPROBS = 100  # of the likeliest tokens that are told with each one


class FinishReason(StrEnum):
    """Why there are no more tokens."""

    STOP_TOKEN = "stop token"
    STOP_STRING = "stop string"  # who reads the text says so
    MAX_TOKENS = "max tokens"
    CONTEXT_FULL = "context full"
    CANCELLED = "cancelled"
    REFUSED = "refused"  # what was asked for cannot be followed any further
    FAILED = "failed"  # the model cannot go on


@dataclass(frozen=True)
class Request:
    """Tokens to continue.

    `stop_tokens` end the text beside the model's own. `logprobs`: report the log-probability of every token, and of so
    many of the likeliest. `boundaries`: ascending positions in the prompt where messages begin; what other prompts may
    share ends there. `score_prompt`: report the prompt's own tokens, too.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    max_tokens: int | None = None  # None: until the context is full
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    mask: TokenMask | None = None
    boundaries: Sequence[int] = ()
    score_prompt: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (("max_tokens", self.max_tokens, None), ("seed", self.seed, None),
                                  ("logprobs", self.logprobs, MOST_LOGPROBS)):  # fmt: skip
            if value is not None and (type(value) is not int or value < 0 or (most is not None and value > most)):
                raise InputError(
                    f"{name} is out of range",
                    found=repr(value),
                    expected="a whole number >= 0" + (f" and up to {most}" if most else ""),
                    remedy=f"change {name}, or leave it out",
                )


@dataclass
class Stats:
    """What one answer took. Times in seconds, of the steps that worked on it."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, known from earlier
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded_tokens: int = 0  # tokens the model was run for, one at a time
    weight_bytes_per_token: int = 0
    stop_reason: str = ""
    major_faults: int = 0  # pages that had to be read when they were touched
    traffic: Traffic = field(default_factory=Traffic)  # of all that ran in this time
    ceilings: "Speeds | None" = None  # of this machine, if they were measured before

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The figures and what follows from them."""
        computed = self.prompt_tokens - self.reused_tokens
        decode = self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_seconds": round(self.prefill_seconds, 4),
            "prefill_tok_s": round(computed / self.prefill_seconds, 2) if self.prefill_seconds else 0.0,
            "decode_seconds": round(self.decode_seconds, 4),
            "decode_tok_s": round(decode, 2),
            "weight_bytes_per_token": self.weight_bytes_per_token,
            "decode_gb_s": round(decode * self.weight_bytes_per_token / 1e9, 3),
            "stop_reason": self.stop_reason,
            **self.traffic.as_dict(),
            "major_faults": self.major_faults,
            "weights_ceiling_gb_s": round(self.ceilings.weights / 1e9, 3) if self.ceilings else None,
            "disk_ceiling_gb_s": round(self.ceilings.disk / 1e9, 3) if self.ceilings else None,
        }


class Generation:
    """A request on its way. Its tokens are taken by one reader, in order, each once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.error: InputError | None = None
        #: With `score_prompt`, for each token of the prompt that was read; None for the first, which nothing precedes.
        self.prompt_scores: list[Chosen | None] = []
        self.prompt_done = 0  # tokens of the prompt that were read or known
        self.piece = 0  # tokens of the prompt that are being read now
        self.finish_reason: FinishReason | None = None
        self.ended_by: Chosen | None = None  # the stop token, which is not one of the answer's
        self._fresh: list[Chosen] = []

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that are done, and all of them."""
        return self.prompt_done, len(self.request.prompt)

    def add(self, chosen: Chosen) -> None:
        """One more token of the answer."""
        self.stats.generated_tokens += 1
        self._fresh.append(chosen)

    def take(self) -> list[Chosen]:
        """The tokens since this was last asked."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self, reason: FinishReason, error: InputError | None = None) -> None:
        """There will be no more tokens. The first reason stands, but that whoever reads the text found its end."""
        if self.finish_reason is None or reason is FinishReason.STOP_STRING:
            self.finish_reason = self.stats.stop_reason = reason
            # Its traceback would hold the sequence's state, and with it pages, until a cycle of garbage is found.
            self.error = error and error.with_traceback(None)
