"""Which tokens may come next, and with what probability: temperature, then top-k, top-p and min-p. numpy only.

A vocabulary has a quarter of a million tokens and few survive, so nothing here sorts all of it; what is computed is
what a full sort would give.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mosaic.runtime.sampling import Sampling

GROUPS = 2048  # more than any usual top_k, and soon sorted


class Likeliest(NamedTuple):
    """Of a whole vocabulary the tokens with the highest scores, best first, of equal ones the lower id first."""

    ids: NDArray[np.intp]
    scores: NDArray[np.floating]


def likeliest(scores: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Ids of the `count` highest of scores [V], best first, of equal ones the lower id first; -inf is never one."""
    floor = np.finfo(scores.dtype).min
    groups = min(GROUPS, len(scores))
    if count <= groups:
        # The maxima of disjoint groups are scores themselves: as many as `count` reach the count-th highest of them.
        rows = len(scores) // groups
        maxima = scores[: rows * groups].reshape(rows, groups).max(axis=0)
        floor = max(floor, np.partition(maxima, groups - count)[groups - count])
    ids = np.flatnonzero(scores >= floor)
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def survivors(scores: NDArray[np.floating], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Ids [C] of tokens and their probabilities [C], from scores [V]; all others have none. C is 0 if all are -inf.

    Each cut sees the probabilities that the one before it left, as in transformers.
    """
    if count := needed(sampling):
        ids = likeliest(scores, count)
        return survivors_among(Likeliest(ids, scores[ids]), sampling)
    return _cut(np.arange(len(scores)), scores, sampling)


def needed(sampling: Sampling) -> int:
    """How many of the likeliest tokens are enough to choose by; 0: all."""
    return 1 if sampling.temperature == 0 else sampling.top_k


def survivors_among(best: Likeliest, sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """`survivors`, by as many of the likeliest tokens as are `needed`; more do no harm."""
    count = needed(sampling)
    ids, scores = best.ids[:count], best.scores[:count]
    if sampling.temperature == 0:
        return ids, np.ones(len(ids))
    return _cut(ids, scores, sampling)


def _cut(
    ids: NDArray[np.intp], scores: NDArray[np.floating], sampling: Sampling
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Temperature and what follows top-k, of tokens with these scores."""
    if not len(ids) or scores.max() == -np.inf:
        return ids[:0], np.empty(0)
    shares = _softmax(scores, sampling.temperature)
    if sampling.top_p < 1:
        nucleus = _nucleus(scores, shares, sampling.top_p)
        ids, shares = ids[nucleus], shares[nucleus]
    if sampling.min_p > 0:
        strong = shares >= sampling.min_p * shares.max()
        ids, shares = ids[strong], shares[strong]
    return ids, shares / shares.sum()


def _softmax(scores: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    shares = scores.astype(np.float64)
    shares -= shares.max()
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf: a share of 0
        shares /= temperature
    np.exp(shares, out=shares)
    shares /= shares.sum()
    return shares


def _nucleus(scores: NDArray[np.floating], shares: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Positions of the fewest best of C tokens that together reach `top_p`, best first; the first always stays."""
    # Tokens below this share have together less than half of what top_p leaves out: the nucleus is among the others.
    heavy = np.flatnonzero(shares >= (1 - top_p) / (2 * len(shares)))
    order = heavy[np.argsort(-scores[heavy], kind="stable")]
    return order[: 1 + np.searchsorted(np.cumsum(shares[order]), top_p)]
