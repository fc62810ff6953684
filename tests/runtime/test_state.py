"""Snapshots: a sequence goes on from one as if nothing else had ever been computed."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.runtime.kv import KVFormat
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.state import DeltaState, Snapshot
from mosaic.runtime.weights import Weights
from support.states import ATTENTION, HYBRID, Memory, expected, held, same

IDS = np.random.default_rng(5).integers(0, 256, 400).tolist()


@pytest.fixture(scope="module", params=[(ReferenceOps, KVFormat.F32), (CpuOps, KVFormat.E4M3)], ids=["f32", "e4m3"])
def model(request, tiny) -> HybridModel:
    ops, kv = request.param
    return HybridModel(Weights(tiny), ops(), kv)


def logits_after(model: HybridModel, ids: list[int], state) -> torch.Tensor:
    return model.logits(model.hidden(ids, state)[-1:])[0]


@pytest.mark.parametrize("kept", [0, 1, 3, 64, 70])
def test_resumed_and_continued_otherwise_is_a_fresh_run(model, kept):
    """To the bit: the same calls on the same states. Resumed twice, after the first sequence went over a page more."""
    fresh, state = model.new_sequence(), model.new_sequence()
    for sequence in (fresh, state):
        if kept:
            model.hidden(IDS[:kept], sequence)
    expected = [logits_after(model, IDS[200:205], fresh), logits_after(model, IDS[7:8], fresh)]
    snapshot = state.snapshot()
    model.hidden(IDS[100:170], state)
    for _ in range(2):
        state = snapshot.resume()
        assert state.length == kept
        assert {layer.position for layer in state.layers if isinstance(layer, DeltaState)} == {kept}
        found = [logits_after(model, IDS[200:205], state), logits_after(model, IDS[7:8], state)]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_interleaved_sequences_answer_as_alone(model):
    alone = []
    for start in (0, 150):
        state = model.new_sequence()
        alone.append([logits_after(model, IDS[i : i + 8], state) for i in range(start, start + 72, 8)])
    both = [model.new_sequence(), model.new_sequence()]
    for step in range(9):
        for number, start in enumerate((0, 150)):
            ids = IDS[start + 8 * step : start + 8 * step + 8]
            assert torch.equal(logits_after(model, ids, both[number]), alone[number][step])


def test_a_sequence_that_is_gone_has_given_all_its_pages_back(model):
    in_use = model.pages_in_use
    state = model.new_sequence()
    model.hidden(IDS[:130], state)
    assert model.pages_in_use == in_use + 2 * 3  # two attention layers
    snapshot = state.snapshot()
    del state
    assert model.pages_in_use == in_use + 2 * 3
    del snapshot
    assert model.pages_in_use == in_use


def test_a_new_state_is_zero(model):
    for layer in model.new_sequence().layers:
        if isinstance(layer, DeltaState):
            assert not layer.conv.any()
            assert not layer.recurrent.any()
        else:
            assert layer.length == 0


def test_a_snapshot_cannot_be_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Memory().new_sequence().snapshot().length = 3


def test_what_a_snapshot_copies():
    memory = Memory(HYBRID)
    state = memory.after(IDS[:128])
    snapshot = state.snapshot()
    assert memory.pool.pages_in_use == 4  # whole pages are all shared
    assert snapshot.nbytes == state.nbytes == 2 * 4 * (3 * (2 * 2 * 4 + 3 * 5) + 3 * 4 * 5)
    memory.advance(state, [1])
    assert memory.pool.pages_in_use == 4 + 2
    kept = state.snapshot()
    assert memory.pool.pages_in_use == 4 + 2 + 2  # of each layer's last page
    assert Memory(ATTENTION).after(IDS[:5]).snapshot().nbytes == 0
    assert kept.length == 129


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100])
def test_without_recurrent_states_any_earlier_token_will_do(kv, length):
    memory = Memory(ATTENTION, kv)
    snapshot = memory.after(IDS[:100]).snapshot()
    assert snapshot.cuttable
    state = snapshot.resume(length)
    assert state.length == length
    memory.advance(state, IDS[200:270])
    assert same(held(state), expected(ATTENTION, kv, IDS[:length] + IDS[200:270]))


def test_a_recurrent_state_cannot_be_cut():
    snapshot = Memory(HYBRID).after(IDS[:10]).snapshot()
    assert not snapshot.cuttable
    with pytest.raises(AssertionError):
        snapshot.resume(9)


OPERATIONS = st.tuples(st.sampled_from(["extend", "snapshot", "resume", "drop"]), st.integers(0, 5), st.integers(0, 70))


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("spec", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@given(st.lists(OPERATIONS, max_size=20))
@settings(max_examples=12, deadline=None)
def test_any_history_leaves_every_sequence_as_if_it_were_alone(spec, kv, operations):
    """Against an oracle that keeps whole tensors. In the end nothing is held, and no page is in use."""
    memory = Memory(spec, kv)
    living: list[tuple[list[int], object]] = [([], memory.new_sequence())]
    for count, (operation, which, amount) in enumerate(operations):
        if not living:
            break
        position = which % len(living)
        tokens, item = living[position]
        if operation == "drop":
            del living[position]
        elif isinstance(item, Snapshot):
            length = min(amount, item.length) if item.cuttable and operation == "resume" else item.length
            living.append((tokens[:length], item.resume(length)))
        elif operation == "snapshot":
            living.append((list(tokens), item.snapshot()))
        else:
            more = [(count + 3 * place) % 7 for place in range(amount)]
            memory.advance(item, more)
            tokens += more
    item = None
    while living:
        tokens, item = living.pop()
        item = item.resume() if isinstance(item, Snapshot) else item
        assert item.length == len(tokens)
        assert same(held(item), expected(spec, kv, tokens))
    item = None
    assert memory.pool.pages_in_use == 0
