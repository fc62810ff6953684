"""Chooses the next token: penalties, bias, a mask, then a draw from what `cuts` leaves. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.runtime.cuts import Likeliest, likeliest, needed, survivors, survivors_among
from mosaic.runtime.sampling import Sampling


class TokenMask(Protocol):
    """What may come next by rules that the sampler need not know: a grammar, say."""

    def allowed(self) -> NDArray[np.bool_]:
        """For every token [num_tokens] whether it may come now; one at least may."""

    def advance(self, token: int) -> None:
        """A token came; it was allowed."""


@dataclass(frozen=True)
class Chosen:
    """A token and, if asked for, how likely the model found it.

    Log-probabilities in nats, of the model's own distribution: before penalties, bias, mask and temperature.
    `top` holds the likeliest tokens with theirs, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one answer; the same seed and logits give the same tokens.

    `prompt`: what came before the answer, for the repetition penalty. `logprobs`: None, or how many of the likeliest
    tokens to tell with each chosen one. InputError if the bias names a token that does not exist.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int | None,
        num_tokens: int,
        *,
        prompt: Sequence[int] = (),
        mask: TokenMask | None = None,
        logprobs: int | None = None,
    ) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(seed)
        self._num_tokens = num_tokens
        self._mask = mask
        self._logprobs = logprobs
        #: How often each token of prompt or answer came in the answer.
        self._times = {token: 0 for token in prompt if token < num_tokens} if sampling.repetition_penalty != 1 else {}
        for token in sampling.logit_bias:
            if token >= num_tokens:
                raise InputError(
                    "logit_bias names a token that does not exist",
                    found=token,
                    expected=f"ids below {num_tokens}",
                    remedy="remove it, or use this model's own tokenizer",
                )

    @property
    def needed(self) -> int:
        """How many of the likeliest tokens `choose` can do with; 0: it wants all logits."""
        wants_all = self._changes or self._logprobs is not None
        return 0 if wants_all else needed(self._sampling)

    @property
    def _changes(self) -> bool:
        """Whether scores are others than the model's logits."""
        return bool(self._sampling.looks_back or self._sampling.logit_bias or self._mask is not None)

    def choose(self, logits: NDArray[np.floating] | Likeliest) -> Chosen:
        """A token for logits [V], remembered for the next one; ids from `num_tokens` on are padding and never chosen.

        As many of the likeliest as are `needed` do as well. InputError if the bias forbids every token that the mask
        allows, or for logits that no sound model computes.
        """
        ids, shares = self.distribution(logits)
        if not len(ids):
            raise InputError(
                "no token can follow",
                found="logit_bias -inf for every token that is allowed here",
                expected="at least one that is not",
                remedy="remove logit_bias, or what the answer must look like",
            )
        sums = np.cumsum(shares)
        token = int(ids[np.searchsorted(sums, self._random.random() * sums[-1], side="right")])
        if self._sampling.looks_back:
            self._times[token] = self._times.get(token, 0) + 1
        if self._mask is not None:
            self._mask.advance(token)
        if self._logprobs is None:
            return Chosen(token)
        assert not isinstance(logits, Likeliest)
        return scored(logits, token, self._logprobs, self._num_tokens)

    def distribution(self, logits: NDArray[np.floating] | Likeliest) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Ids [C] of the tokens that `choose` would draw from, and their probabilities [C]."""
        scores = logits.scores if isinstance(logits, Likeliest) else logits[: self._num_tokens]
        if not scores.max() < np.inf:  # NaN is not, either
            raise InputError(
                "the model's logits are not finite",
                found=scores.max(),
                expected="a number",
                remedy="check the model directory with mosaic-verify",
            )
        if isinstance(logits, Likeliest):
            assert len(scores) >= self.needed > 0
            return survivors_among(logits, self._sampling)
        if self._changes:
            scores = scores.copy()
            self._penalise(scores)
            self._restrict(scores)
        return survivors(scores, self._sampling)

    def _penalise(self, scores: NDArray[np.floating]) -> None:
        """Change the scores [num_tokens] of tokens that came before, and only theirs."""
        count = len(self._times)
        ids = np.fromiter(self._times.keys(), np.intp, count)
        times = np.fromiter(self._times.values(), np.float64, count)
        found, factor = scores[ids].astype(np.float64), self._sampling.repetition_penalty
        found = np.where(found > 0, found / factor, found * factor)
        found -= self._sampling.presence_penalty * (times > 0) + self._sampling.frequency_penalty * times
        scores[ids] = found

    def _restrict(self, scores: NDArray[np.floating]) -> None:
        """Add the bias to scores [num_tokens] and set to -inf what the mask forbids."""
        for token, bias in self._sampling.logit_bias.items():
            scores[token] += bias
        if self._mask is not None:
            allowed = self._mask.allowed()[: self._num_tokens]
            scores[~allowed] = -np.inf


def scored(logits: NDArray[np.floating], token: int, logprobs: int, num_tokens: int) -> Chosen:
    """A given token's log-probability under logits [V] and those of the `logprobs` likeliest ids below `num_tokens`."""
    logits = logits[:num_tokens]
    terms = logits.astype(np.float64)
    most = terms.max()
    terms -= most
    total = np.log(np.exp(terms, out=terms).sum())
    top = likeliest(logits, logprobs) if logprobs else ()

    def logprob(number: int) -> float:
        return float(np.float64(logits[number]) - most - total)

    return Chosen(token, logprob(token), tuple((int(number), logprob(number)) for number in top))
