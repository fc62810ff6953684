"""What is asked of the sampler: settings, their ranges, and what a model's own files recommend.

Settings only: what they do to a distribution is told in `cuts` and `sampler`.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json

GENERATION_FILE = "generation_config.json"
#: The largest penalty or bias; the smallest repetition penalty is its reciprocal. A factor of e^100 decides everything,
#: and a logit with all of them is still a finite float32.
MOST = 100.0


@dataclass(frozen=True)
class Sampling:
    """How to sample; InputError for a value out of range. The defaults change nothing.

    temperature         divides the logits; 0: the likeliest token
    top_k               only so many tokens, the likeliest; 0: no cut
    top_p               only the likeliest that together have this share; 1: no cut
    min_p               only tokens with at least this part of the likeliest one's probability
    repetition_penalty  of tokens in prompt or answer positive logits are divided by it, negative ones multiplied
    presence_penalty    subtracted from the logits of tokens in the answer
    frequency_penalty   the same, once for each time they occur there
    logit_bias          added to the logits of single tokens; -inf: never this one
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if type(getattr(self, name)) not in (int, float):
                raise _out_of_range(name, repr(getattr(self, name)), "a number")
        signed = f"a number from -{MOST:g} to {MOST:g}"
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature <= sys.float_info.max, "a number >= 0"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number >= 0 (0: no cut)"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "repetition_penalty",
                1 / MOST <= self.repetition_penalty <= MOST,
                f"a number from {1 / MOST} to {MOST:g}",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= MOST, signed),
            ("frequency_penalty", abs(self.frequency_penalty) <= MOST, signed),
        ):
            if not holds:
                raise _out_of_range(name, getattr(self, name), expected)
        for token, bias in self.logit_bias.items():
            if not (isinstance(token, int) and token >= 0):
                raise _out_of_range("logit_bias", f"the token {token!r}", "a token id for each bias")
            if not (bias == -math.inf or abs(bias) <= MOST):
                raise _out_of_range("logit_bias", f"{bias} for token {token}", f"{signed}, or -inf")

    @property
    def looks_back(self) -> bool:
        """Whether what was said before matters."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json recommends, and the tokens that end a text."""

    sampling: Sampling
    stop: frozenset[int]


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Defaults of a model directory; greedy and without stop tokens where the file is silent."""
    file = folder / GENERATION_FILE
    config = read_json(file) if file.is_file() else {}
    stop = stop_tokens(config, file)
    # Where a key is absent, the defaults of the file's own format.
    repetition = _number(config, file, "repetition_penalty", 1.0)
    if not config.get("do_sample", False):
        return GenerationDefaults(Sampling(temperature=0.0, repetition_penalty=repetition), stop)
    sampling = Sampling(
        temperature=_number(config, file, "temperature", 1.0),
        top_k=int(_number(config, file, "top_k", 50)),
        top_p=_number(config, file, "top_p", 1.0),
        min_p=_number(config, file, "min_p", 0.0),
        repetition_penalty=repetition,
    )
    return GenerationDefaults(sampling, stop)


def stop_tokens(config: Mapping[str, Any], file: Path) -> frozenset[int]:
    """`eos_token_id` of a configuration file: one token, a list, or none."""
    value = config.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise _unusable(file, "eos_token_id", value, "a token number or a list of them")
    return frozenset(tokens)


def _number(config: Mapping[str, Any], file: Path, key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise _unusable(file, key, value, "a number")
    return float(value)


def _unusable(file: Path, key: str, found: object, expected: str) -> InputError:
    return InputError(
        f"{key} is not usable", file=file, found=repr(found), expected=expected, remedy="copy the file again"
    )


def _out_of_range(name: str, found: object, expected: str) -> InputError:
    return InputError(f"{name} is out of range", found=found, expected=expected, remedy=f"change {name}")
