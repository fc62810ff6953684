"""Settings of the sampler: their ranges, and what generation_config.json recommends."""

import json
from pathlib import Path

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.sampling import GENERATION_FILE, Sampling, generation_defaults


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
        ("temperature", 10**400),
        ("top_k", 2.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", -100.5),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", 101),
        ("frequency_penalty", float("nan")),
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


@pytest.mark.parametrize("bias", [{1: 101.0}, {1: float("inf")}, {1: float("nan")}, {-1: 1.0}, {"1": 1.0}], ids=str)
def test_a_bias_out_of_range_is_refused(bias):
    with pytest.raises(InputError, match="logit_bias is out of range"):
        Sampling(logit_bias=bias)


def test_settings_can_be_hashed_and_compared():
    one, other = Sampling(logit_bias={1: 1.0}), Sampling(logit_bias={1: 1.0})
    assert one == other
    assert hash(one) == hash(other)
    assert one != Sampling()


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_looks_back(name):
    assert Sampling(**{name: 1.5}).looks_back
    assert not Sampling(0.5, 20, 0.9, 0.1, logit_bias={1: 1.0}).looks_back


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


def test_min_p_and_the_repetition_penalty_are_read(tmp_path):
    found = defaults_of(tmp_path, do_sample=True, min_p=0.05, repetition_penalty=1.05).sampling
    assert found == Sampling(1.0, 50, 1.0, 0.05, 1.05)
    assert defaults_of(tmp_path, repetition_penalty=1.05).sampling == Sampling(0.0, repetition_penalty=1.05)


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
        {"top_k": float("inf")},
        {"min_p": 10**400},
        {"repetition_penalty": 0},
        {"eos_token_id": {"id": 1}},
    ],
    ids=str,
)
def test_values_of_the_file_that_make_no_sense_are_refused(tmp_path, config):
    with pytest.raises(InputError):
        defaults_of(tmp_path, do_sample=True, **config)
