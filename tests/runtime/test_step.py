"""Decode in company: a step of several sequences gives each of them what it would get alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mosaic import _native
from mosaic.runtime.experts.arena import Arena
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.recorded import RecordedExperts, open_recording
from mosaic.runtime.experts.trace import read_trace
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import Activations, CpuOps
from mosaic.runtime.ops.profiled import ProfiledOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.weights import Weights
from support.models import convert_folder
from support.tiny import Tiny, write_checkpoint

MODELS = {
    "3.6": Tiny(mtp=False, visual=False),
    "next": Tiny(family="qwen3_next", mtp=False),
    "moe-dense-layer": Tiny(family="qwen3_moe", mlp_only_layers=(1,)),
}
LENGTHS = (1, 5, 62, 64, 2, 9)  # of the prompts: pages of the cache end in the midst of the steps
STEPS = 3
IDS = np.random.default_rng(11).integers(0, 256, (len(LENGTHS), max(LENGTHS) + STEPS)).tolist()


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    write_checkpoint(MODELS[request.param], root / "source")
    return convert_folder(root / "source", root / "out")


@pytest.fixture(scope="module")
def expected(folder):
    return in_turn(HybridModel(Weights(folder), CpuOps()))


def begun(model):
    """Sequences of different lengths, each after its prompt."""
    states = [model.new_sequence() for _ in LENGTHS]
    for ids, length, state in zip(IDS, LENGTHS, states, strict=True):
        model.hidden(ids[:length], state)
    return states


def tokens(step):
    """What each sequence is given next."""
    return [ids[length + step] for ids, length in zip(IDS, LENGTHS, strict=True)]


def in_turn(model):
    """Hidden states and logits [STEPS, B, ..], sequence by sequence."""
    states, hidden, logits = begun(model), [], []
    for step in range(STEPS):
        rows = [model.hidden([token], state) for token, state in zip(tokens(step), states, strict=True)]
        hidden.append(torch.cat(rows))
        logits.append(torch.cat([model.logits(row) for row in rows]))
    return torch.stack(hidden), torch.stack(logits)


def in_company(model):
    """The same in steps. Who is in a company changes from step to step."""
    states, hidden, logits = begun(model), [], []
    for step in range(STEPS):
        ids, rows = tokens(step), [torch.empty(0)] * len(states)
        for company in (range(step % 3), range(step % 3, len(states))):  # of 0, 1 or 2, and the others
            if company:
                found = model.step([ids[i] for i in company], [states[i] for i in company])
                for i, row in zip(company, found, strict=True):
                    rows[i] = row
        hidden.append(torch.stack(rows))
        logits.append(model.logits(hidden[-1][:, None])[:, 0])
    assert [state.length for state in states] == [length + STEPS for length in LENGTHS]
    return torch.stack(hidden), torch.stack(logits)


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("activations", Activations)
@pytest.mark.parametrize("isa", _native.isas())
def test_the_bits_of_each_alone(folder, isa, activations):
    model = HybridModel(Weights(folder), CpuOps(activations, isa))
    assert same(in_company(model), in_turn(model))


@pytest.mark.parametrize("kv", [KVFormat.F32, KVFormat.E4M3])
def test_whatever_keys_and_values_are_kept_in(folder, kv):
    model = HybridModel(Weights(folder), CpuOps(), kv)
    assert same(in_company(model), in_turn(model))


def test_by_the_reference(folder):
    """A product of several rows may be summed up otherwise than that of one, in float64."""
    model = HybridModel(Weights(folder), ReferenceOps(), KVFormat.F32)
    for found, expected in zip(in_company(model), in_turn(model), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("foretell", [False, True])
@pytest.mark.parametrize("slots", [8, 11, 17, 40])
def test_with_fewer_slots_than_a_step_has_experts(folder, expected, slots, foretell):
    """A company chooses up to 16 experts of a layer; 8 slots are the fewest a model can have."""
    weights = Weights(folder)
    weights.make_resident()
    places = ExpertPlaces(weights)
    experts = CachedExperts(places, Arena(places, folder, slots))
    model = HybridModel(weights, CpuOps(), experts=experts, foretell=foretell)
    assert same(in_company(model), expected)
    assert experts.traffic.misses > 0
    assert (experts.traffic.foretold > 0) == foretell


class Watched(CachedExperts):
    """Notes what it is told of each layer."""

    def observe(self, layer, chosen, elsewhere=()):
        self.chosen.append(chosen.shape)
        super().observe(layer, chosen, elsewhere)

    def arriving(self, layer, experts, tokens):
        self.asked.append((len(experts), tokens))
        return super().arriving(layer, experts, tokens)


def test_a_step_is_decoding_for_the_store(folder):
    """A token of each sequence, not a prompt; an expert that several chose is asked for once."""
    weights = Weights(folder)
    places = ExpertPlaces(weights)
    experts = Watched(places, Arena(places, folder, len(places)))
    model = HybridModel(weights, CpuOps(), experts=experts)
    experts.chosen, experts.asked = [], []
    states = begun(model)
    experts.chosen, experts.asked = [], []
    model.step(tokens(0), states)
    assert experts.chosen == [(len(LENGTHS), 1, places.top_k)] * len(places.layers)
    assert {count for _, count in experts.asked} == {1}
    assert max(count for count, _ in experts.asked) <= places.num_experts


def test_a_trace_has_the_tokens_of_all_sequences(folder, tmp_path):
    """In their order, each with what its router chose for it alone."""
    weights = Weights(folder)
    places, traces = ExpertPlaces(weights), {}
    for name in ("turns", "step"):
        with open_recording(tmp_path / name, places, "tiny") as writer:
            model = HybridModel(weights, CpuOps(), experts=RecordedExperts(MappedExperts(weights, places), writer))
            states = begun(model)
            if name == "step":
                model.step(tokens(0), states)
            else:
                for token, state in zip(tokens(0), states, strict=True):
                    model.hidden([token], state)
        traces[name] = read_trace(tmp_path / name).experts
    assert len(traces["step"]) == sum(LENGTHS) + len(LENGTHS)
    assert np.array_equal(traces["step"], traces["turns"])


def test_weights_are_read_once_for_all(folder):
    """By what ProfiledOps counts: sequences that are the same use the same experts, and a step reads what one does."""
    ops = ProfiledOps(CpuOps())
    model = HybridModel(Weights(folder), ops)
    read = []
    for count in (1, len(LENGTHS)):
        states = [model.new_sequence() for _ in range(count)]
        ops.reset()
        model.step([65] * count, states)
        weights = [entry for name, entry in ops.entries.items() if name not in ("attention", "gated_delta")]
        read.append(sum(entry.nbytes for entry in weights))
    assert read[0] == read[1] > 0
