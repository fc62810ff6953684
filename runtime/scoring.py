"""How well a model foresees a text, token by token, and how far two models are apart; logits are never all held."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.format.errors import InputError
from mosaic.format.evaluation import LARGEST, Divergence, Perplexity
from mosaic.runtime.model import HybridModel

BLOCK_LOGITS = 1 << 23  # at a time, of each model; in float64, and a few copies

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """A model, and what it made of a text: final hidden states [T, H]."""

    folder: Path
    model: HybridModel
    hidden: Tensor


@dataclass(frozen=True)
class Compared:
    """Of T tokens: the reference's negative log-likelihoods [T], KL(reference || this) [T], and whether both hold the
    same token likeliest [T].
    """

    nll: Floats
    divergence: Floats
    same_top: NDArray[np.bool_]


@dataclass(frozen=True)
class Scores:
    """Of T tokens, in nats: negative log-likelihoods [T], and how they compare if there is a reference."""

    nll: Floats
    compared: Compared | None


def windows_of(tokens: Sequence[int], context: int) -> list[Sequence[int]]:
    """Windows of `context` tokens, one after the other without overlap; the last may be shorter, but not one token."""
    windows = [tokens[first : first + context] for first in range(0, len(tokens), context)]
    return [window for window in windows if len(window) > 1]


@torch.inference_mode()
def score(
    this: Subject, reference: Subject | None, targets: Sequence[int], block_done: Callable[[int], object]
) -> Scores:
    """The scores of the tokens `targets` [T], each by the states in its row. `block_done` is told of how many.

    Softmax is computed in float64.
    """
    expected = torch.tensor(targets, dtype=torch.long)
    block = max(1, BLOCK_LOGITS // this.model.spec.vocab_size)
    parts: list[list[Tensor]] = []
    # Even blocks: a row alone would take other kernels than several do.
    for rows in torch.arange(len(targets)).tensor_split(ceil(len(targets) / block)):
        ours = log_probabilities(this, rows)
        parts.append([_nll(ours, expected[rows])])
        if reference:
            theirs = log_probabilities(reference, rows)
            divergence = (theirs.exp() * (theirs - ours)).sum(dim=1)
            parts[-1] += [_nll(theirs, expected[rows]), divergence, theirs.argmax(dim=1) == ours.argmax(dim=1)]
        block_done(len(rows))
    nll, *compared = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    return Scores(nll, Compared(*compared) if compared else None)


def _nll(log_probabilities: Tensor, expected: Tensor) -> Tensor:
    return -log_probabilities.gather(1, expected[:, None])[:, 0]


def log_probabilities(subject: Subject, rows: Tensor) -> Tensor:
    """Log-softmax [n, V] in float64 of the states in n rows; InputError if they are not numbers."""
    result = subject.model.logits(subject.hidden[rows]).double().log_softmax(dim=-1)
    if not result.isfinite().all():
        raise InputError(
            "the model gives no probabilities",
            file=subject.folder,
            found="logits that are infinite or not numbers",
            expected="numbers",
            remedy="mosaic-verify tells whether a model directory is damaged; download a checkpoint again",
        )
    return result


def perplexity(nll: Floats) -> Perplexity:
    """exp(mean), and its standard error as if tokens were independent. Of differences of two models: their ratio."""
    mean, error = float(nll.mean()), standard_error(nll)
    if mean > log(LARGEST):
        raise InputError(
            "the model foresees nothing of this text",
            found=f"a mean negative log-likelihood of {mean:.4g} nats",
            expected=f"at most {log(LARGEST):.0f}",
            remedy="check with mosaic-verify that the model is not damaged, and that the text is one",
        )
    return Perplexity(exp(mean), None if error is None else exp(mean) * error)


def summary(values: Floats) -> Divergence:
    """What the divergences of all tokens come to."""
    median, p99 = (float(np.quantile(values, share)) for share in (0.5, 0.99))
    return Divergence(float(values.mean()), standard_error(values), median, p99, float(values.max()))


def standard_error(values: Floats) -> float | None:
    """Of the mean; None of a single value."""
    return float(values.std(ddof=1)) / sqrt(len(values)) if len(values) > 1 else None
