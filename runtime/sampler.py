"""Chooses the next token from logits: temperature, top-k, top-p, in this order. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0: the likeliest token. top_k 0 and top_p 1: no cut."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number >= 0"),
            ("top_k", self.top_k >= 0, "a whole number >= 0 (0: no cut)"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
        ):
            if not holds:
                raise InputError(
                    f"{name} is out of range", found=getattr(self, name), expected=expected, remedy=f"change {name}"
                )


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
    if not config.get("do_sample", False):
        return GenerationDefaults(Sampling(temperature=0.0), stop)
    # Where a key is absent, the defaults of the file's own format.
    temperature, top_p = _number(config, file, "temperature", 1.0), _number(config, file, "top_p", 1.0)
    return GenerationDefaults(Sampling(temperature, int(_number(config, file, "top_k", 50)), top_p), stop)


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
    if type(value) not in (int, float):
        raise _unusable(file, key, value, "a number")
    return float(value)


def _unusable(file: Path, key: str, found: object, expected: str) -> InputError:
    return InputError(
        f"{key} is not usable", file=file, found=repr(found), expected=expected, remedy="copy the file again"
    )


class Sampler:
    """Samples with one random stream; the same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling, seed: int | None, num_tokens: int) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(seed)
        self._num_tokens = num_tokens

    def choose(self, logits: NDArray[np.floating]) -> int:
        """A token id for logits [V]; ids from `num_tokens` on are padding and never chosen."""
        logits = logits[: self._num_tokens].astype(np.float64)
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        if self._sampling.top_k:
            order = order[: self._sampling.top_k]
        scaled = (logits[order] - logits[order[0]]) / self._sampling.temperature
        shares = np.exp(scaled)
        shares /= shares.sum()
        # A token stays as long as the likelier ones together do not reach top_p; the first always stays.
        before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
        shares = np.where(before < self._sampling.top_p, shares, 0.0)
        return int(order[self._random.choice(len(order), p=shares / shares.sum())])
