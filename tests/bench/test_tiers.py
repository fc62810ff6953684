"""The parts of the tiers benchmark that could lie: routing that is not the trace's, a limit that does not hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.replayed import ReplayedOps
from bench.routing import Kind, routing
from mosaic.recipes import demo_model
from mosaic.runtime.experts.trace import Trace, TraceHeader, TraceWriter
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.weights import Weights
from support.cgroup import limited

WORKER = Path(__file__).with_name("tiers_worker.py")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield demo_model()


@pytest.fixture(scope="module")
def trace(demo):
    spec = Weights(demo).spec
    layers = tuple(range(len(spec.layers)))
    choices = routing(Kind.PUBLISHED, len(layers), spec.moe.num_experts, spec.moe.top_k, seed=1)
    experts = np.array([next(choices) for _ in range(30)], np.uint16)
    return Trace(TraceHeader("synthetic", layers, spec.moe.num_experts, spec.moe.top_k, 1), experts)


class Observed:
    """Passes operations on, and keeps what experts were computed with."""

    def __init__(self, ops):
        self._ops, self.chosen = ops, []

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def experts(self, x, routing, source):
        self.chosen.append(routing.experts.numpy().copy())
        return self._ops.experts(x, routing, source)


def test_a_replayed_router_chooses_what_the_trace_says(demo, trace):
    """A prompt and then tokens one by one, past the end of the trace."""
    observed = Observed(ReplayedOps(CpuOps(), trace))
    model = HybridModel(Weights(demo), observed)
    state, top_k = model.new_sequence(), trace.header.top_k
    for count in (20, *[1] * 15):
        model.hidden(list(range(count)), state)
    layers = len(trace.header.layers)
    per_token = [np.stack([calls[:, :top_k] for calls in observed.chosen[first : first + layers]], axis=1)
                 for first in range(0, len(observed.chosen), layers)]  # fmt: skip
    assert np.array_equal(np.concatenate(per_token), np.concatenate([trace.experts, trace.experts[:5]]))


def test_a_worker_tells_what_it_took(demo, trace, tmp_path):
    with TraceWriter(tmp_path / "a.trace", trace.header) as writer:
        for layer in trace.header.layers:
            writer.record(layer, trace.experts[:, layer])
    command = [sys.executable, WORKER, demo, 0, 1, 4, 8, 40, tmp_path / "a.trace"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["slots"] is None  # it fits
    assert found["decode"]["hits"] == 8 * trace.experts[0].size
    assert found["decode_tok_s"] > 0
    assert found["prefill_tok_s"] > 0
    assert 0 < found["peak_rss"] < 2 * found["plan"]


@pytest.mark.skipif(os.getuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no control groups")
def test_a_limit_holds():
    code = "import sys; data = bytearray(int(sys.argv[1])); data[::4096] = b'x' * len(data[::4096]); print(len(data))"

    def take(nbytes):
        with limited(200 << 20) as enter:
            return subprocess.run(
                [sys.executable, "-c", code, str(nbytes)], preexec_fn=enter, capture_output=True
            ).returncode

    assert take(50 << 20) == 0
    assert take(400 << 20) == -9  # killed
