"""Few scores come from a device: the tokens chosen by them are those that all logits would give."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mosaic.runtime.cuts import Likeliest, likeliest
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.engine import Engine
from mosaic.runtime.model import SPARE
from mosaic.runtime.sampler import Sampler
from mosaic.runtime.sampling import Sampling

V, PADDED = 500, 512
KINDS = [Sampling(temperature=0.0), Sampling(top_k=20), Sampling(top_k=3, temperature=0.7, top_p=0.8, min_p=0.05)]


def some_logits(seed: int, ties: bool) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=PADDED).astype(np.float32)
    logits[V:] = 100  # padding
    return np.round(logits * 2) / 2 if ties else logits


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("ties", [False, True])
def test_the_likeliest_are_enough(sampling, ties):
    for seed in range(50):
        logits = some_logits(seed, ties)
        whole, few = (Sampler(sampling, seed, V) for _ in range(2))
        ids = likeliest(logits[:V], few.needed + 3)
        assert few.choose(Likeliest(ids, logits[ids])) == whole.choose(logits)


@pytest.mark.parametrize(
    "changed",
    [{"presence_penalty": 1.0}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"top_k": 0}],
)
def test_what_looks_at_all_logits_says_so(changed):
    assert Sampler(replace(KINDS[1], **changed), 0, V).needed == 0
    assert Sampler(KINDS[1], 0, V, logprobs=0).needed == 0
    assert Sampler(KINDS[1], 0, V).needed == 20


@pytest.fixture(scope="module")
def engines(tiny):
    """With the head on a device, and without one."""
    return [Engine.load(tiny, context=256, device=device) for device in (HostDevice(room=1 << 30), "cpu")]


@pytest.mark.parametrize("sampling", KINDS)
def test_a_device_gives_the_same_candidates(engines, sampling):
    """In the order of a full sort; of each sequence of a step."""
    models, count = [engine.model for engine in engines], engines[0].num_tokens
    needed = [Sampler(sampling, 0, count).needed] * 2
    hidden = [model.hidden(range(2, 40), model.new_sequence())[-2:] for model in models]
    assert torch.equal(*hidden)
    few, whole = (model.candidates(each, needed, count) for model, each in zip(models, hidden, strict=True))
    for found, logits in zip(few, whole, strict=True):
        assert isinstance(found, Likeliest)
        assert len(found.ids) == needed[0] + SPARE
        assert np.array_equal(found.ids, likeliest(logits[:count], len(found.ids)))
        assert np.array_equal(found.scores, logits[found.ids])
    assert not isinstance(models[0].candidates(hidden[0], [0, 5], count)[1], Likeliest)


def test_ties_beyond_what_was_fetched_bring_all(engines, monkeypatch):
    model, count = engines[0].model, engines[0].num_tokens
    hidden = model.hidden(range(2, 9), model.new_sequence())[-1:]
    monkeypatch.setattr(model, "_head", lambda x: torch.zeros(*x.shape[:-1], model.spec.vocab_size))
    assert not isinstance(model.candidates(hidden, [4], count)[0], Likeliest)


def test_the_tokens_of_a_run(engines):
    """Sampled as the model's settings say, and greedily."""
    for options in ({}, {"temperature": 0.0}, {"top_k": 5, "seed": 4}, {"presence_penalty": 0.5, "seed": 1}):
        texts = [engine.generate([5, 6, 7], max_tokens=30, **{"seed": 3, **options}).tokens for engine in engines]
        assert texts[0] == texts[1]
