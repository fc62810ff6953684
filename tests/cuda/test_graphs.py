"""Which segments are recorded, when, and what becomes of recordings. Of whole models: kernels/test_graphs.py."""

from types import SimpleNamespace

import pytest
import torch

from mosaic.runtime.ops.cuda.graphs import COMPANY_RUNS, PLAIN_RUNS, Graphs
from support.recording import Recording


class Layer:
    """Adds up what it is given in the memory of its states, which it returns doubled."""

    def segment(self, x, addend, states):
        if addend is not None:
            x = x + addend
        for rows, state in zip(x.view(len(states), -1, 4), states, strict=True):
            state.memory += rows.sum(0)
        return x * 2, torch.cat([state.memory for state in states]) * 2


def state(address):
    return SimpleNamespace(address=address, memory=torch.zeros(4))


@pytest.fixture
def record():
    return Recording()


def plain_runs(states):
    """Before a segment is recorded."""
    return PLAIN_RUNS if len(states) == 1 else COMPANY_RUNS


def often(graphs, layer, x, addend, states, times=None):
    """Runs it, so often that it is recorded unless said otherwise; the last outputs."""
    for _ in range(times or plain_runs(states) + 1):
        found = graphs.run(layer.segment, x, addend, states)
    return found


@pytest.mark.parametrize("with_addend", [True, False])
@pytest.mark.parametrize("sequences", [1, 3])
def test_same_as_plain(record, sequences, with_addend):
    graphs, layer = Graphs(record), Layer()
    ours, plain = ([state(number) for number in range(sequences)] for _ in range(2))
    shape = (1, 4) if sequences == 1 else (sequences, 1, 4)
    for run in range(plain_runs(ours) + 4):
        x, addend = torch.randn(shape), torch.randn(shape) if with_addend else None
        found = graphs.run(layer.segment, x, addend, ours)
        for one, other in zip(found, layer.segment(x, addend, plain), strict=True):
            assert torch.equal(one, other)
        assert record.begun == max(run + 1 - plain_runs(ours), 0)
    assert record.made == 1


def test_prompts_are_not_recorded(record):
    graphs = Graphs(record)
    often(graphs, Layer(), torch.ones(2, 4), None, [state(0)], 5)
    often(graphs, Layer(), torch.ones(2, 2, 4), None, [state(0), state(1)], COMPANY_RUNS + 3)
    assert not record.made


def test_a_recording_is_of_one_segment_form_and_company(record):
    """Each of these was run often enough for one recording; no two of them share it."""
    graphs, layer, x = Graphs(record), Layer(), torch.ones(1, 4)
    one, two = state(1), state(2)
    runs = [
        (layer, x, None, [one]),
        (layer, x, x, [one]),
        (layer, x, None, [two]),
        (Layer(), x, None, [one]),
        (layer, torch.ones(2, 1, 4), None, [one, two]),
        (layer, torch.ones(2, 1, 4), None, [two, one]),
        (layer, torch.ones(1, 1, 4), None, [one]),
    ]
    for number, arguments in enumerate(runs, 1):
        often(graphs, *arguments)
        assert record.made == number
    for arguments in runs:
        often(graphs, *arguments, times=1)
    assert record.made == len(runs)
    assert record.begun == 2 * len(runs)


def test_outputs_are_good_until_the_same_runs_again(record):
    graphs, layer, memories = Graphs(record), Layer(), [state(1), state(2)]
    for memory in memories:
        often(graphs, layer, torch.zeros(1, 4), None, [memory])
    found = [graphs.run(layer.segment, torch.full((1, 4), 3.0 + place), None, [memories[place]]) for place in (0, 1)]
    assert [float(outputs[0][0, 0]) for outputs in found] == [6, 8]
    again = graphs.run(layer.segment, torch.full((1, 4), 9.0), None, [memories[0]])
    assert again[0] is found[0][0]


def test_the_least_lately_used_is_forgotten(record):
    graphs, layer, x = Graphs(record, most=2), Layer(), torch.ones(1, 4)
    one, two, three = map(state, (1, 2, 3))
    for memory in (one, two):
        often(graphs, layer, x, None, [memory])
    often(graphs, layer, x, None, [one], 1)
    often(graphs, layer, x, None, [three], 1)  # forgets two
    often(graphs, layer, x, None, [one], 1)
    assert (record.made, record.begun) == (2, 4)
    often(graphs, layer, x, None, [two], PLAIN_RUNS)
    assert (record.made, record.begun) == (2, 4)
    often(graphs, layer, x, None, [two], 1)
    assert (record.made, record.begun) == (3, 5)


def test_what_cannot_be_recorded_is_run_as_it_is(record):
    graphs, layer, x, one, two = Graphs(record), Layer(), torch.ones(1, 4), state(1), state(2)
    often(graphs, layer, x, None, [one])
    record.broken = True
    assert not graphs.note
    with pytest.warns(UserWarning, match="answers take longer"):
        often(graphs, layer, x, None, [two])
    assert graphs.note.endswith("operation not permitted when stream is capturing")
    record.broken = False
    found = often(graphs, layer, x, None, [two], 3)
    assert found[1].eq(2 * (PLAIN_RUNS + 1 + 3)).all()  # each run once, the one that failed to be recorded too
    assert record.made == 1
    begun = record.begun
    often(graphs, layer, x, None, [one], 1)  # what was recorded before is used
    assert record.begun == begun + 1


def test_bugs_are_not_hidden():
    def broken(segment, x, addend, states):
        raise AssertionError

    graphs = Graphs(broken)
    with pytest.raises(AssertionError):
        often(graphs, Layer(), torch.ones(1, 4), None, [state(1)])
