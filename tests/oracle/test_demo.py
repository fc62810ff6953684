"""The trained demo: conversion costs next to nothing in perplexity, and a mix-up of scales would be seen."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from mosaic.recipes import DEMO_CHECKPOINT, FOLDER
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.weights import E4M3Matrix, Expert, Weights
from support.models import convert_folder

BF16 = {"bible": 22.279, "austen": 40.249, "chat": 16.836, "all": 27.252}  # by transformers: training/evaluate.py
END_OF_TEXT = 4080


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.set_num_threads(1)
    return Weights(convert_folder(DEMO_CHECKPOINT, tmp_path_factory.mktemp("demo") / "out"))


@pytest.fixture(scope="module")
def windows(weights):
    """{text: windows of 257 token ids}, cut as recipes/demo/training/evaluate.py cuts them."""
    spec = importlib.util.spec_from_file_location("heldout", FOLDER / "demo" / "training" / "heldout.py")
    heldout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heldout)
    tokenizer = Tokenizer(weights.folder)
    result = {}
    for name, documents in heldout.read(FOLDER / "demo" / "heldout").items():
        ids = [token for document in documents for token in (*tokenizer.encode(document), END_OF_TEXT)]
        result[name] = [window[0] for window in heldout.windows(np.array(ids), 1)]
    return result


def perplexity(model, windows):
    nats, count = 0.0, 0
    for window in windows:
        logits = model.logits(model.hidden(window[:-1].tolist(), model.new_sequence()))
        nats += cross_entropy(logits, torch.from_numpy(window[1:]), reduction="sum").item()
        count += len(window) - 1
    return math.exp(nats / count)


def test_perplexity_of_a_few_windows(weights, windows):
    """Loose bounds on a tenth of the text, for every run; the whole of it is the slow test below."""
    model = HybridModel(weights, ReferenceOps(), KVFormat.F32)
    sample = {name: windows[name][:: max(1, len(windows[name]) // 8)] for name in windows}
    found = {name: perplexity(model, sample[name]) for name in sample}
    for name, value in found.items():
        assert value == pytest.approx(BF16[name], rel=0.35), found


class MixedUp(MappedExperts):
    """Each expert has its neighbour's down scales."""

    def expert(self, layer, expert):
        mine, other = super().expert(layer, expert), super().expert(layer, expert ^ 1)
        return Expert(mine.gate, mine.up, E4M3Matrix(mine.down.codes, other.down.scales))


def test_a_mix_up_of_expert_scales_is_seen(weights, windows):
    """The demo is rescaled so that this wrecks it."""
    sample = windows["bible"][:4]
    right = perplexity(HybridModel(weights, ReferenceOps(), KVFormat.F32), sample)
    mixed = HybridModel(weights, ReferenceOps(), KVFormat.F32, MixedUp(weights))
    assert perplexity(mixed, sample) > 5 * right


@pytest.mark.slow
@pytest.mark.parametrize("kv", [KVFormat.F32, KVFormat.BF16, KVFormat.E4M3])
def test_perplexity_of_all_heldout_text(weights, windows, kv):
    """Within 0.5 % of the BF16 checkpoint in every text (noise is about 0.1 %), whatever the KV format."""
    model = HybridModel(weights, ReferenceOps(), kv)
    found = {name: perplexity(model, windows[name]) for name in windows}
    counts = {name: len(windows[name]) for name in windows}
    nats = sum(math.log(found[name]) * counts[name] for name in windows) / sum(counts.values())
    found["all"] = math.exp(nats)
    print(kv, {name: f"{value:.3f} ({value / BF16[name] - 1:+.3%})" for name, value in found.items()})
    for name, value in found.items():
        assert value == pytest.approx(BF16[name], rel=5e-3), found
