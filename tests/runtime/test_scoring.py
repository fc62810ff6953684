"""Windows, likelihoods and divergences, against plain numpy on logits that are given."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime import scoring
from mosaic.runtime.scoring import Subject, perplexity, score, standard_error, summary, windows_of

T, V = 37, 50


class Given:
    """A model whose logits are its states."""

    spec = SimpleNamespace(vocab_size=V)

    def logits(self, hidden):
        return hidden


def subject(logits, tmp_path):
    return Subject(tmp_path, Given(), torch.from_numpy(logits))


@pytest.fixture
def logits():
    rng = np.random.default_rng(1)
    first = (5 * rng.standard_normal((T, V))).astype(np.float32)
    return first, (first + 2 * rng.standard_normal((T, V))).astype(np.float32)


TARGETS = np.random.default_rng(2).integers(0, V, T).tolist()


def log_softmax(logits):
    values = logits.astype(np.float64)
    return (
        values
        - np.log(np.exp(values - values.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - values.max(axis=1, keepdims=True)
    )


@pytest.mark.parametrize("block", [V, 5 * V, 7 * V + 3, 1 << 20])
def test_scores_are_those_of_numpy(logits, tmp_path, monkeypatch, block):
    """Whatever is computed at a time. Bounds: a few roundings of float64, of values up to 30."""
    monkeypatch.setattr(scoring, "BLOCK_LOGITS", block)
    told = []
    found = score(subject(logits[0], tmp_path), subject(logits[1], tmp_path), TARGETS, told.append)
    this, reference = map(log_softmax, logits)
    rows = np.arange(T)
    assert found.nll == pytest.approx(-this[rows, TARGETS], abs=1e-13)
    assert found.compared.nll == pytest.approx(-reference[rows, TARGETS], abs=1e-13)
    assert found.compared.divergence == pytest.approx((np.exp(reference) * (reference - this)).sum(axis=1), abs=1e-12)
    assert np.array_equal(found.compared.same_top, this.argmax(axis=1) == reference.argmax(axis=1))
    assert 0 < found.compared.same_top.mean() < 1
    assert sum(told) == T


def test_the_direction_is_from_the_reference(tmp_path):
    """By hand: KL((1/2, 1/2) || (1/4, 3/4)) = log(2 / sqrt(3))."""
    quarter, half = (np.full((1, V), -1e4, np.float32) for _ in range(2))
    quarter[0, :2], half[0, :2] = np.log([0.25, 0.75]), np.log([0.5, 0.5])
    found = score(subject(quarter, tmp_path), subject(half, tmp_path), [0], lambda _: None)
    assert found.compared.divergence[0] == pytest.approx(math.log(2 / math.sqrt(3)), rel=1e-6)
    assert found.nll[0] == pytest.approx(math.log(4), rel=1e-6)


def test_without_a_reference_nothing_is_compared(logits, tmp_path):
    assert score(subject(logits[0], tmp_path), None, TARGETS, lambda _: None).compared is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(logits, tmp_path, value):
    logits[1][20, 3] = value
    with pytest.raises(InputError, match="no probabilities") as refusal:
        score(subject(logits[0], tmp_path), subject(logits[1], tmp_path / "other"), TARGETS, lambda _: None)
    assert refusal.value.facts["file"] == str(tmp_path / "other")


def test_perplexity_and_its_error():
    nll = np.random.default_rng(3).exponential(3, 500)
    found = perplexity(nll)
    assert found.value == pytest.approx(np.exp(nll.mean()))
    # The error of the exponential, by the spread of resampled texts; that of 4000 of them is known within 5 %.
    draws = np.random.default_rng(4).choice(nll, (4000, 500)).mean(axis=1)
    assert found.error == pytest.approx(np.exp(draws).std(), rel=0.05)
    assert perplexity(nll[:1]).error is None


def test_a_perplexity_beyond_all_bounds_is_refused():
    with pytest.raises(InputError, match="foresees nothing"):
        perplexity(np.array([800.0, 900.0]))


def test_summary():
    values = np.arange(101.0)
    found = summary(values)
    assert (found.mean, found.median, found.p99, found.maximum) == (50, 50, 99, 100)
    assert found.error == standard_error(values) == pytest.approx(values.std() / math.sqrt(100))


@pytest.mark.parametrize(
    ("count", "context", "sizes"),
    [(10, 4, [4, 4, 2]), (9, 4, [4, 4]), (8, 4, [4, 4]), (3, 4, [3]), (2, 2, [2]), (3, 2, [2]), (1, 4, []), (0, 4, [])],
)
def test_windows(count, context, sizes):
    tokens = list(range(count))
    windows = windows_of(tokens, context)
    assert [len(window) for window in windows] == sizes
    assert [token for window in windows for token in window] == tokens[: sum(sizes)]
