"""Layer by layer over many windows: the same bits as window by window, wherever the states are kept."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mosaic import _native
from mosaic.runtime import layer_major
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.layer_major import final_hidden
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.weights import Weights

IDS = np.random.default_rng(5).integers(0, 256, 2000).tolist()


def window_by_window(model, windows):
    parts = []
    for window in windows:
        state = model.new_sequence()
        for first in range(0, len(window), PREFILL_CHUNK):
            parts.append(model.hidden(window[first : first + PREFILL_CHUNK], state))
    return torch.cat(parts)


@pytest.mark.parametrize(("isa", "kv"), [*((isa, KVFormat.BF16) for isa in _native.isas()), ("", KVFormat.E4M3)])
def test_same_bits_as_window_by_window(tiny, isa, kv):
    """Windows shorter and longer than a chunk, one that ends in a chunk of one token, one of one token."""
    weights = Weights(tiny)
    model = HybridModel(weights, CpuOps(isa=isa), kv)
    windows = [IDS[:70], IDS[70 : 71 + PREFILL_CHUNK], IDS[5:6], IDS[1200:1264]]
    done = []
    found = final_hidden(model, weights, windows, lambda: done.append(1))
    expected = window_by_window(model, windows)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(model.logits(found[:70]), model.logits(expected[:70]))
    assert len(done) == len(model.spec.layers)


def test_the_reference_keeps_float64(tiny):
    weights = Weights(tiny)
    model = HybridModel(weights, ReferenceOps(), KVFormat.F32)
    windows = [IDS[:33], IDS[33:50]]
    found = final_hidden(model, weights, windows, lambda: None)
    assert found.dtype == torch.float64
    assert torch.equal(found, window_by_window(model, windows))


def test_states_in_a_file(tiny, monkeypatch, tmp_path):
    weights = Weights(tiny)
    model = HybridModel(weights, CpuOps())
    windows = [IDS[:100], IDS[100:130]]
    held = final_hidden(model, weights, windows, lambda: None)
    made = []
    temporary = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: made.append(1) or temporary(dir=tmp_path))
    monkeypatch.setattr(layer_major, "free_memory", lambda: 0)
    assert torch.equal(final_hidden(model, weights, windows, lambda: None), held)
    assert made
    assert not list(tmp_path.iterdir())


def test_pages_of_a_layer_are_let_go(tiny):
    """Resident while it is at work, no longer when it is done; and what is read again is the same."""
    weights = Weights(tiny)
    shard = tiny / "layers-01.safetensors"

    def resident():
        """Bytes of the shard that are mapped in, by the kernel."""
        total, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                inside = line.endswith(str(shard))
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
        return total

    weights.read_ahead("layers.1.")
    before, norm = resident(), weights.tensor("layers.1.input_norm").float()
    assert before > shard.stat().st_size / 2
    weights.release("layers.1.")
    assert resident() < before / 2
    assert torch.equal(weights.tensor("layers.1.input_norm").float(), norm)
