"""The sampler held against transformers' logits processors and a full sort: the same tokens, the same probabilities."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mosaic.format.errors import InputError
from mosaic.runtime.cuts import GROUPS, likeliest
from mosaic.runtime.sampler import Sampler, scored
from mosaic.runtime.sampling import Sampling

DRAWS = 4000
#: Chi-square exceeds its mean n by this many standard deviations (sqrt(2n)) with a probability below 1e-6 for n >= 1
#: (Laurent-Massart: P(X > n + 2 sqrt(n t) + 2t) < e^-t, t = 14). The seeds are fixed: a pass is a pass for ever.
T = 14.0


def random_logits(size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * spread).astype(np.float32)


def expected_shares(logits: np.ndarray, sampling: Sampling, seen: tuple[int, ...] = ()) -> np.ndarray:
    """Probabilities by transformers' processors, in float64, after the tokens `seen`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1 and seen:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    return processors(torch.tensor([seen or (0,)]), scores).softmax(dim=-1)[0].numpy()


def shares_of(sampler: Sampler, logits: np.ndarray) -> np.ndarray:
    """The probabilities the sampler draws with, by token id."""
    shares = np.zeros(len(logits))
    ids, values = sampler.distribution(logits)
    shares[ids] = values
    return shares


class Fixed:
    """A mask that always allows the same, and knows what it was told."""

    def __init__(self, allowed: list[bool] | np.ndarray) -> None:
        self._allowed = np.array(allowed, bool)
        self.came: list[int] = []

    def allowed(self) -> np.ndarray:
        return self._allowed

    def advance(self, token: int) -> None:
        self.came.append(token)


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
    Sampling(1.0, min_p=0.05),
    Sampling(1.5, 0, 0.9, 0.02),
    Sampling(0.8, 20, 0.95, 0.1),
    Sampling(1.0, min_p=1.0),
]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_cuts_and_probabilities_are_those_of_transformers(sampling, seed):
    """float64 on both sides: some ten roundings of probabilities below 1, so 1e-14 leaves room."""
    logits = random_logits(200, seed)
    expected = expected_shares(logits, sampling)
    found = shares_of(Sampler(sampling, 0, len(logits)), logits)
    assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sampling", [CUTS[0], CUTS[1], CUTS[3], CUTS[7], CUTS[9]], ids=str)
def test_tokens_come_as_often_as_their_probability_says(sampling):
    logits = random_logits(30, 3, spread=0.7)
    expected = expected_shares(logits, sampling)
    sampler = Sampler(sampling, 7, len(logits))
    counts = np.bincount([sampler.choose(logits).token for _ in range(DRAWS)], minlength=len(logits))
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


@pytest.mark.parametrize("values", [[1, 3, 3, 2, 3], [0, 0, 0], [-1, -np.inf, -1]], ids=str)
def test_greedy_takes_the_lowest_of_equal_ids(values):
    logits = np.array(values, np.float32)
    assert Sampler(Sampling(temperature=0.0), None, len(values)).choose(logits).token == values.index(max(values))


def test_top_k_one_is_greedy_even_with_ties():
    logits = np.array([1, 3, 3, 2], np.float32)
    sampler = Sampler(Sampling(1.0, 1, 1.0), 0, 4)
    assert {sampler.choose(logits).token for _ in range(20)} == {1}


def test_a_tie_at_the_cut_keeps_the_lower_id():
    logits = np.array([0, 3, 3, 3], np.float32)
    sampler = Sampler(Sampling(1.0, 2, 1.0), 0, 4)
    assert {sampler.choose(logits).token for _ in range(50)} == {1, 2}


def test_top_p_keeps_the_token_that_reaches_it():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    for top_p, survivors in ((0.4, {0}), (0.6, {0, 1}), (0.7, {0, 1}), (0.8, {0, 1, 2}), (0.99, {0, 1, 2, 3})):
        sampler = Sampler(Sampling(1.0, 0, top_p), 0, 4)
        assert {sampler.choose(logits).token for _ in range(200)} == survivors, top_p


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    steps = [random_logits(100, seed) for seed in range(50)]

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(), seed, 100)
        return [sampler.choose(logits).token for logits in steps]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)  # equal once in e^100 or so


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(1e6), Sampling(1.0, 3, 0.5)], ids=str)
def test_padding_rows_are_never_chosen(sampling):
    logits = np.concatenate((random_logits(10), np.full(6, 1e9, np.float32)))
    sampler = Sampler(sampling, 0, 10)
    assert max(sampler.choose(logits).token for _ in range(300)) < 10


def test_padding_rows_take_no_share():
    logits = np.concatenate((np.log([0.5, 0.3, 0.2]), [50.0])).astype(np.float32)
    sampler = Sampler(Sampling(1.0, 0, 0.75), 0, 3)
    assert {sampler.choose(logits).token for _ in range(100)} == {0, 1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_without_nan(temperature):
    logits = random_logits(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        sampler = Sampler(Sampling(temperature), 0, 1000)
        assert {sampler.choose(logits).token for _ in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300, 1.7e308])
def test_a_huge_temperature_is_uniform(temperature):
    """Logits within +-8 over 1e6 differ by 1.6e-5, so shares of a hundred by 1.6e-7."""
    logits = random_logits(100)
    shares = shares_of(Sampler(Sampling(temperature), 0, 100), logits)
    np.testing.assert_allclose(shares, 0.01, atol=2e-7)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 0.5, 1.0, 1e300])
def test_minus_infinity_is_never_chosen(temperature):
    logits = random_logits(20)
    forbidden = np.arange(20) % 3 != 0
    logits[forbidden] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        sampler = Sampler(Sampling(temperature), 0, 20)
        assert not any(forbidden[sampler.choose(logits).token] for _ in range(200))


def test_the_largest_logits_do_not_overflow():
    largest = np.finfo(np.float32).max
    logits = np.array([largest, -largest, largest, 0], np.float32)
    np.testing.assert_array_equal(shares_of(Sampler(Sampling(), 0, 4), logits), [0.5, 0, 0.5, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(1.0, 3, 0.5)], ids=str)
def test_logits_that_are_not_finite_are_refused(sampling, value):
    logits = np.array([1, value, 0, -np.inf], np.float32)
    with pytest.raises(InputError, match="logits are not finite"):
        Sampler(sampling, 0, 4).choose(logits)
    Sampler(sampling, 0, 1).choose(logits)  # padding may hold anything


def test_choosing_does_not_change_the_logits():
    logits = random_logits(50)
    before = logits.copy()
    for sampling in (Sampling(0.0), Sampling(0.7, 5, 0.5), Sampling(presence_penalty=1.0, logit_bias={3: 1.0})):
        sampler = Sampler(sampling, 0, 40, mask=Fixed([True, False] * 20), logprobs=3)
        sampler.choose(logits)
        sampler.choose(logits)
    np.testing.assert_array_equal(logits, before)


# A vocabulary of the size of the real ones


def full_sort(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities the plain way: everything in float64, everything sorted."""
    values = logits.astype(np.float64)
    order = np.argsort(-values, kind="stable")[: sampling.top_k or None]
    shares = np.exp((values[order] - values[order[0]]) / sampling.temperature)
    shares /= shares.sum()
    shares[np.cumsum(shares) - shares >= sampling.top_p] = 0
    shares[shares < sampling.min_p * shares[0]] = 0
    result = np.zeros(len(logits))
    result[order] = shares / shares.sum()
    return result


@pytest.mark.parametrize("decimals", [6, 1, 0], ids="{}-decimals".format)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 20, 0.95),
        Sampling(1.0, 3000, 0.95),
        Sampling(1.0, 0, 0.95),
        Sampling(0.7, 0, 0.8, 0.01),
        Sampling(0.3),
        Sampling(0.6, 50, 1.0, 0.05),
    ],
    ids=str,
)
def test_a_large_vocabulary_gives_what_a_full_sort_would(sampling, decimals):
    """Rounded logits are equal in groups of thousands: the cuts go through the middle of a group."""
    logits = random_logits(248_320, 5).round(decimals)
    found, expected = shares_of(Sampler(sampling, 0, len(logits)), logits), full_sort(logits, sampling)
    # A token on the edge of top_p may fall on either side by the rounding of a sum of 248,320 terms.
    edge = np.flatnonzero((found > 0) != (expected > 0))
    assert len(edge) <= (sampling.top_p < 1 and not sampling.top_k)
    np.testing.assert_allclose(np.delete(found, edge), np.delete(expected, edge), rtol=1e-3 if len(edge) else 1e-9)


@given(
    scores=st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 2.5, 7.0]), min_size=1, max_size=40),
    repeat=st.sampled_from([1, 2, GROUPS // 8, GROUPS]),
    count=st.integers(1, 3 * GROUPS),
    shift=st.integers(0, 50),
)
def test_the_likeliest_are_those_of_a_stable_sort(scores, repeat, count, shift):
    values = np.roll(np.repeat(np.array(scores, np.float32), repeat), shift)
    order = np.argsort(-values, kind="stable")[:count]
    assert likeliest(values, count).tolist() == order[values[order] > -np.inf].tolist()


# Penalties, bias, mask


PROMPT = (3, 3, 17, 50)


@pytest.mark.parametrize("penalty", [1.3, 0.8, 100.0, 0.01])
@pytest.mark.parametrize("answer", [(), (17, 60, 60)], ids=str)
def test_the_repetition_penalty_is_that_of_transformers(penalty, answer):
    """Of prompt and answer. Equal to the rounding of float64, since the logits are float64."""
    logits, sampling = random_logits(100).astype(np.float64), Sampling(repetition_penalty=penalty)
    sampler = Sampler(sampling, 0, 100, prompt=PROMPT)
    say(sampler, answer)
    np.testing.assert_allclose(shares_of(sampler, logits), expected_shares(logits, sampling, PROMPT + answer), 1e-12)


def say(sampler: Sampler, tokens: tuple[int, ...]) -> None:
    """Make the sampler choose these."""
    for token in tokens:
        logits = np.full(100, -1e9, np.float32)
        logits[token] = 1e9
        assert sampler.choose(logits).token == token


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 0.3), (100.0, -100.0)])
def test_presence_and_frequency_count_the_answer_only(presence, frequency):
    logits = random_logits(100).astype(np.float64)
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    sampler = Sampler(sampling, 0, 100, prompt=PROMPT)
    np.testing.assert_array_equal(shares_of(sampler, logits), shares_of(Sampler(Sampling(), 0, 100), logits))
    say(sampler, (17, 60, 60, 60))
    logits_after = logits.copy()
    logits_after[17] -= presence + frequency
    logits_after[60] -= presence + 3 * frequency
    np.testing.assert_allclose(shares_of(sampler, logits), expected_shares(logits_after, Sampling()), 1e-12)


def test_repetition_comes_before_presence_and_bias_and_temperature_after_both():
    logits = np.array([2.0, -1.0, 0.5, 0.0])
    sampling = Sampling(0.5, repetition_penalty=2.0, presence_penalty=0.25, logit_bias={0: 1.0, 3: -0.5})
    sampler = Sampler(sampling, 0, 4, prompt=(1,))
    say_first = np.array([1e9, 0, 0, 0])
    assert sampler.choose(say_first).token == 0
    scores = np.array([2.0 / 2 - 0.25 + 1.0, -1.0 * 2, 0.5, -0.5]) / 0.5
    np.testing.assert_allclose(shares_of(sampler, logits), np.exp(scores) / np.exp(scores).sum(), 1e-12)


def test_penalties_apply_to_greedy_answers_too():
    logits = np.array([1.0, 3.0, 2.9, 2.8], np.float32)
    sampler = Sampler(Sampling(0.0, presence_penalty=0.15), None, 4)
    assert [sampler.choose(logits).token for _ in range(5)] == [1, 2, 1, 1, 1]


def test_padding_in_the_prompt_is_not_penalised():
    sampler = Sampler(Sampling(repetition_penalty=2.0), 0, 4, prompt=(1, 5))
    assert len(shares_of(sampler, random_logits(6))) == 6


def test_a_bias_of_minus_infinity_bans_and_one_of_100_decides():
    logits = random_logits(20)
    best = int(logits.argmax())
    assert Sampler(Sampling(0.0, logit_bias={7: 100.0}), None, 20).choose(logits).token == 7
    banned = Sampler(Sampling(0.0, logit_bias={best: -np.inf}), None, 20).choose(logits).token
    assert banned == int(np.argsort(-logits)[1])
    assert shares_of(Sampler(Sampling(logit_bias={best: -np.inf}), 0, 20), logits)[best] == 0


def test_a_bias_for_no_token_of_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="logit_bias names a token that does not exist") as caught:
        Sampler(Sampling(logit_bias={19: 1.0, 20: 1.0}), 0, 20)
    assert caught.value.facts["found"] == "20"


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(1.0, 5, 0.9), Sampling(min_p=0.1)], ids=str)
def test_only_what_the_mask_allows_comes_and_the_mask_is_told(sampling):
    logits, mask = random_logits(20), Fixed(np.arange(24) % 7 == 3)
    sampler = Sampler(sampling, 0, 20, mask=mask)
    tokens = [sampler.choose(logits).token for _ in range(50)]
    assert set(tokens) <= {3, 10, 17}
    assert mask.came == tokens


def test_the_mask_comes_before_the_cuts():
    """The likeliest two of what is allowed, though three others are likelier."""
    logits = np.array([9.0, 8, 7, 2, 1, 0], np.float32)
    sampler = Sampler(Sampling(top_k=2), 0, 6, mask=Fixed([False] * 3 + [True] * 3))
    assert np.flatnonzero(shares_of(sampler, logits)).tolist() == [3, 4]


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(), Sampling(1.0, 5, 0.9)], ids=str)
def test_a_bias_that_forbids_all_that_is_allowed_is_refused(sampling):
    banning = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, logit_bias={1: -np.inf})
    sampler = Sampler(banning, 0, 4, mask=Fixed([False, True, False, False]))
    with pytest.raises(InputError, match="no token can follow"):
        sampler.choose(random_logits(4))


# Log-probabilities


@pytest.mark.parametrize("logprobs", [0, 1, 5, 300])
def test_log_probabilities_are_the_models_own(logprobs):
    """Of the plain softmax over the vocabulary, whatever the sampler makes of it; to the rounding of float64."""
    logits = np.concatenate((random_logits(100), np.full(6, 50.0, np.float32)))
    sampling = Sampling(0.3, 7, 0.9, 0.01, 1.5, 1.0, 1.0, {4: 3.0})
    sampler = Sampler(sampling, 0, 100, prompt=(1, 2), mask=Fixed([True] * 100), logprobs=logprobs)
    expected = torch.from_numpy(logits[:100].astype(np.float64)).log_softmax(-1).numpy()
    for _ in range(5):
        chosen = sampler.choose(logits)
        assert chosen.logprob == pytest.approx(expected[chosen.token], abs=1e-12)
        order = np.argsort(-logits[:100], kind="stable")[:logprobs]
        assert [token for token, _ in chosen.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in chosen.top], expected[order], atol=1e-12)


def test_no_log_probabilities_unless_asked_for():
    chosen = Sampler(Sampling(), 0, 10).choose(random_logits(10))
    assert (chosen.logprob, chosen.top) == (None, ())


def test_a_given_token_is_scored_as_a_chosen_one():
    logits = random_logits(50)
    chosen = Sampler(Sampling(), 3, 40, logprobs=4).choose(logits)
    assert scored(logits, chosen.token, 4, 40) == chosen


def test_log_probabilities_of_the_largest_logits_are_finite():
    largest = np.finfo(np.float32).max
    found = scored(np.array([largest, -largest, largest], np.float32), 0, 2, 3)
    assert found.logprob == pytest.approx(np.log(0.5))
    assert found.top == ((0, found.logprob), (2, found.logprob))
