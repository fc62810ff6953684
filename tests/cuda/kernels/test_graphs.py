"""A model whose segments are recorded gives the bits of one that runs them as they are written.

Without a GPU a recording is the segments' own code, but it is given nothing of what the host knows of a sequence.
"""

import numpy as np
import pytest
import torch

from mosaic.runtime.home import plainly
from mosaic.runtime.kv import PAGE_TOKENS, KVFormat
from mosaic.runtime.ops.cuda import graphs as module
from mosaic.runtime.ops.cuda.device import Recorder
from mosaic.runtime.ops.cuda.graphs import PLAIN_RUNS, Graphs
from mosaic.runtime.weights import Weights
from support.models import convert_folder
from support.on_device import on_device
from support.recording import Recording
from support.tiny import Tiny, write_checkpoint

#: A linear-attention layer and a full one, without experts.
TINY = Tiny(
    family="qwen3_next",
    layers=2,
    interval=2,
    mlp_only_layers=(0, 1),
    hidden=128,
    dense_inter=128,
    vocab=272,
    heads=2,
    kv_heads=1,
    head_dim=32,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=16,
    linear_value_dim=16,
    mtp=False,
    shards=1,
)
IDS = np.random.default_rng(3).integers(0, 256, (2, 2 * PAGE_TOKENS)).tolist()
PROMPT = PAGE_TOKENS - PLAIN_RUNS - 1  # so that a page is added once a segment was recorded
STEPS = PLAIN_RUNS + 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    root = tmp_path_factory.mktemp("graphs")
    write_checkpoint(TINY, root / "source")
    return Weights(convert_folder(root / "source", root / "out"))


class Counting:
    """A Record that counts what it makes and what is begun."""

    def __init__(self, record):
        self._record, self.made, self.begun = record, 0, 0

    def __call__(self, *arguments):
        self.made += 1
        graph = self._record(*arguments)

        def begin():
            self.begun += 1
            return graph()

        return begin


def test_same_bits(weights, device, monkeypatch):
    monkeypatch.setattr(module, "COMPANY_RUNS", module.PLAIN_RUNS)
    record = Counting(Recording() if device.type == "cpu" else Recorder(device))
    graphs = Graphs(record)
    layers = len(weights.spec.layers)
    models = [on_device(weights, KVFormat.BF16, device, slots=False, run=run) for run in (plainly, graphs.run)]
    pairs = [[model.new_sequence() for model in models] for _ in range(2)]

    def read(number, ids):
        """A prompt."""
        found = [model.hidden(ids, state) for model, state in zip(models, pairs[number], strict=True)]
        assert torch.equal(*found)

    def step(ids):
        found = [model.step(ids, states) for model, states in zip(models, zip(*pairs, strict=True), strict=True)]
        assert torch.equal(*found)

    for number, count in enumerate((PROMPT, 2)):
        read(number, IDS[number][:count])
    for place in range(STEPS):
        step([IDS[0][PROMPT + place], IDS[1][2 + place]])
    assert record.made == layers
    assert record.begun == layers * (STEPS - PLAIN_RUNS)

    addresses = [layer.address for layer in pairs[1][1].layers]
    pairs[1] = []  # gone, and another takes its place
    pairs[1] = [model.new_sequence() for model in models]
    read(1, IDS[1][10:13])
    assert [layer.address for layer in pairs[1][1].layers] == addresses
    step([IDS[0][-1], IDS[1][-1]])
    assert record.made == layers
    assert record.begun == layers * (STEPS - PLAIN_RUNS + 1)
    assert not graphs.note
