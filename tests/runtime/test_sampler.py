"""The sampler held against transformers' logits processors: the same tokens survive, with the same probabilities."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mosaic.format.errors import InputError
from mosaic.runtime.sampler import GENERATION_FILE, Sampler, Sampling, generation_defaults

DRAWS = 4000
#: Chi-square exceeds its mean n by this many standard deviations (sqrt(2n)) with a probability below 1e-6 for n >= 1
#: (Laurent-Massart: P(X > n + 2 sqrt(n t) + 2t) < e^-t, t = 14). The seeds are fixed: a pass is a pass for ever.
T = 14.0


def random_logits(size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


def expected_shares(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities by transformers' processors, in float64."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    return processors(torch.zeros(1, 1, dtype=torch.long), scores).softmax(dim=-1)[0].numpy()


def shares_of(sampler: Sampler, logits: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The probabilities the sampler draws with: every call of `Generator.choice` with p is recorded as a histogram."""
    shares = np.zeros(len(logits))
    original = sampler._random

    class Recorder:
        def choice(self, count: int, p: np.ndarray) -> int:
            recorded.append(np.array(p))
            return int(original.choice(count, p=p))

    recorded: list[np.ndarray] = []
    monkeypatch.setattr(sampler, "_random", Recorder())
    sampler.choose(logits)
    descending = np.argsort(-logits.astype(np.float64), kind="stable")
    shares[descending[: len(recorded[0])]] = recorded[0]
    return shares


CUTS = [
    Sampling(1.0, 0, 1.0),
    Sampling(0.6, 0, 1.0),
    Sampling(1.7, 0, 1.0),
    Sampling(1.0, 5, 1.0),
    Sampling(1.0, 1, 1.0),
    Sampling(1.0, 1000, 1.0),
    Sampling(1.0, 0, 0.9),
    Sampling(1.0, 0, 0.5),
    Sampling(1.0, 0, 0.01),
    Sampling(0.7, 20, 0.8),
    Sampling(1.0, 20, 0.95),
    Sampling(2.5, 8, 0.6),
]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_cuts_and_probabilities_are_those_of_transformers(monkeypatch, sampling, seed):
    """float64 on both sides: some ten roundings of probabilities below 1, so 1e-14 leaves room."""
    logits = random_logits(200, seed)
    expected = expected_shares(logits, sampling)
    found = shares_of(Sampler(sampling, 0, len(logits)), logits, monkeypatch)
    assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sampling", [CUTS[0], CUTS[1], CUTS[3], CUTS[7], CUTS[9]], ids=str)
def test_tokens_come_as_often_as_their_probability_says(sampling):
    logits = random_logits(30, 3, spread=0.7)
    expected = expected_shares(logits, sampling)
    sampler = Sampler(sampling, 7, len(logits))
    counts = np.bincount([sampler.choose(logits) for _ in range(DRAWS)], minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    frequent = expected * DRAWS >= 5  # chi-square wants five expected draws in a cell; the rest is one cell
    cells = [(counts[i], expected[i] * DRAWS) for i in np.flatnonzero(frequent)]
    rest = expected[~frequent].sum() * DRAWS
    if rest >= 5:
        cells.append((counts[~frequent].sum(), rest))
    chi_square = sum((found - mean) ** 2 / mean for found, mean in cells)
    freedom = len(cells) - 1
    assert freedom >= 1
    assert chi_square < freedom + 2 * np.sqrt(freedom * T) + 2 * T


@pytest.mark.parametrize("values", [[1, 3, 3, 2, 3], [0, 0, 0], [-1, -np.inf, -1], [np.inf, np.inf, 0]], ids=str)
def test_greedy_takes_the_lowest_of_equal_ids(values):
    logits = np.array(values, np.float32)
    assert Sampler(Sampling(temperature=0.0), None, len(values)).choose(logits) == values.index(max(values))


def test_top_k_one_is_greedy_even_with_ties():
    logits = np.array([1, 3, 3, 2], np.float32)
    sampler = Sampler(Sampling(1.0, 1, 1.0), 0, 4)
    assert {sampler.choose(logits) for _ in range(20)} == {1}


def test_a_tie_at_the_cut_keeps_the_lower_id():
    logits = np.array([0, 3, 3, 3], np.float32)
    sampler = Sampler(Sampling(1.0, 2, 1.0), 0, 4)
    assert {sampler.choose(logits) for _ in range(50)} == {1, 2}


def test_top_p_keeps_the_token_that_reaches_it():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    for top_p, survivors in ((0.4, {0}), (0.6, {0, 1}), (0.7, {0, 1}), (0.8, {0, 1, 2}), (0.99, {0, 1, 2, 3})):
        sampler = Sampler(Sampling(1.0, 0, top_p), 0, 4)
        assert {sampler.choose(logits) for _ in range(200)} == survivors, top_p


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    steps = [random_logits(100, seed) for seed in range(50)]

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(), seed, 100)
        return [sampler.choose(logits) for logits in steps]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)  # equal once in e^100 or so


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(1e6), Sampling(1.0, 3, 0.5)], ids=str)
def test_padding_rows_are_never_chosen(sampling):
    logits = np.concatenate((random_logits(10), np.full(6, 1e9, np.float32)))
    sampler = Sampler(sampling, 0, 10)
    assert max(sampler.choose(logits) for _ in range(300)) < 10


def test_padding_rows_take_no_share():
    logits = np.concatenate((np.log([0.5, 0.3, 0.2]), [50.0])).astype(np.float32)
    sampler = Sampler(Sampling(1.0, 0, 0.75), 0, 3)
    assert {sampler.choose(logits) for _ in range(100)} == {0, 1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_without_nan(temperature):
    logits = random_logits(1000)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning, message="invalid")  # NaN made on the way
        warnings.filterwarnings("ignore", category=RuntimeWarning, message="overflow")  # to -inf: a share of 0
        sampler = Sampler(Sampling(temperature), 0, 1000)
        assert {sampler.choose(logits) for _ in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300, 1.7e308])
def test_a_huge_temperature_is_uniform(monkeypatch, temperature):
    """Logits within +-8 over 1e6 differ by 1.6e-5, so shares of a hundred by 1.6e-7."""
    logits = random_logits(100)
    shares = shares_of(Sampler(Sampling(temperature), 0, 100), logits, monkeypatch)
    np.testing.assert_allclose(shares, 0.01, atol=2e-7)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 0.5, 1.0, 1e300])
def test_minus_infinity_is_never_chosen(temperature):
    logits = random_logits(20)
    forbidden = np.arange(20) % 3 != 0
    logits[forbidden] = -np.inf
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning, message="invalid")  # NaN made on the way
        sampler = Sampler(Sampling(temperature), 0, 20)
        assert not any(forbidden[sampler.choose(logits)] for _ in range(200))


def test_the_largest_logits_do_not_overflow(monkeypatch):
    largest = np.finfo(np.float32).max
    logits = np.array([largest, -largest, largest, 0], np.float32)
    np.testing.assert_array_equal(shares_of(Sampler(Sampling(), 0, 4), logits, monkeypatch), [0.5, 0, 0.5, 0])


def test_choosing_does_not_change_the_logits():
    logits = random_logits(50)
    before = logits.copy()
    for sampling in (Sampling(0.0), Sampling(0.7, 5, 0.5)):
        Sampler(sampling, 0, 40).choose(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0000001),
        ("top_p", float("nan")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name} is out of range") as caught:
        Sampling(**{name: value})
    assert caught.value.facts["found"] == str(value)


@pytest.mark.parametrize("values", [(0.0, 0, 1.0), (1e-9, 1, 1e-9), (100.0, 10**9, 1.0)])
def test_values_at_the_edge_are_accepted(values):
    sampling = Sampling(*values)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == values


def defaults_of(folder: Path, **config: object):
    (folder / GENERATION_FILE).write_text(json.dumps(config))
    return generation_defaults(folder)


def test_the_published_file_is_read_as_written(tmp_path):
    """Qwen3.6-35B-A3B, MODEL-SPEC 6.4."""
    found = defaults_of(
        tmp_path,
        bos_token_id=248044,
        do_sample=True,
        eos_token_id=[248046, 248044],
        pad_token_id=248044,
        temperature=1.0,
        top_k=20,
        top_p=0.95,
    )
    assert found.sampling == Sampling(1.0, 20, 0.95)
    assert found.stop == {248046, 248044}


def test_eos_may_be_one_number(tmp_path):
    assert defaults_of(tmp_path, eos_token_id=0).stop == {0}
    assert defaults_of(tmp_path, eos_token_id=7).stop == {7}
    assert defaults_of(tmp_path, eos_token_id=None).stop == frozenset()
    assert defaults_of(tmp_path).stop == frozenset()


def test_without_do_sample_the_file_means_greedy(tmp_path):
    assert defaults_of(tmp_path, do_sample=False, temperature=0.7, top_k=5, top_p=0.5).sampling.temperature == 0
    assert defaults_of(tmp_path, temperature=0.7).sampling.temperature == 0


def test_what_a_sampling_file_leaves_out_is_as_in_transformers(tmp_path):
    """transformers' own defaults: temperature 1, top_k 50, top_p 1."""
    assert defaults_of(tmp_path, do_sample=True).sampling == Sampling(1.0, 50, 1.0)
    assert defaults_of(tmp_path, do_sample=True, top_k=0, top_p=None).sampling == Sampling(1.0, 0, 1.0)


def test_no_file_means_greedy_and_no_stop(tmp_path):
    found = generation_defaults(tmp_path)
    assert found.sampling.temperature == 0
    assert found.stop == frozenset()


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_broken_file_is_refused(tmp_path, text):
    (tmp_path / GENERATION_FILE).write_text(text)
    with pytest.raises(InputError) as caught:
        generation_defaults(tmp_path)
    assert GENERATION_FILE in caught.value.facts["file"]


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"top_p": 2},
        {"temperature": "hot"},
        {"top_k": [20]},
        {"eos_token_id": {"id": 1}},
    ],
    ids=str,
)
def test_values_of_the_file_that_make_no_sense_are_refused(tmp_path, config):
    with pytest.raises(InputError):
        defaults_of(tmp_path, do_sample=True, **config)
