"""Routing traces: synthetic ones at small sizes, and what the demo's router chose for a piece of a held-out text."""

from pathlib import Path

import numpy as np
import pytest

from bench.routing import Kind, routing
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.experts.trace import Trace, TraceHeader, TraceWriter, read_trace
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.weights import Weights

LAYERS, EXPERTS, TOP_K, TOKENS = 8, 32, 4, 500


class RecordingOps(CpuOps):
    """Writes down what the router of each layer chooses, layer after layer."""

    def __init__(self, writer: TraceWriter, layers: int) -> None:
        super().__init__()
        self._writer, self._layers, self._calls = writer, layers, 0

    def route(self, logits, top_k, *arguments) -> Routing:
        routing = super().route(logits, top_k, *arguments)
        self._writer.record(self._calls % self._layers, routing.experts[:, :top_k].numpy())
        self._calls += 1
        return routing


@pytest.fixture(scope="session")
def demo_trace(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    weights = Weights(demo)
    spec = weights.catalog.spec
    layers = len(spec.layers)
    text = (DEMO_CHECKPOINT.parent / "heldout" / "austen.txt").read_text()
    file = tmp_path_factory.mktemp("routing") / "demo.trace"
    header = TraceHeader("demo", tuple(range(layers)), spec.moe.num_experts, spec.moe.top_k, 1)
    with TraceWriter(file, header) as writer:
        model = HybridModel(weights, RecordingOps(writer, layers))
        model.hidden(Tokenizer(demo).encode(text[:4000])[:TOKENS], model.new_sequence())
    trace = read_trace(file)
    assert trace.experts.shape == (TOKENS, layers, spec.moe.top_k)
    return trace


def synthetic(kind: Kind, tokens: int = TOKENS, seed: int = 0) -> Trace:
    choices = routing(kind, LAYERS, EXPERTS, TOP_K, seed)
    experts = np.array([next(choices) for _ in range(tokens)], np.uint16)
    return Trace(TraceHeader(f"synthetic, {kind}", tuple(range(LAYERS)), EXPERTS, TOP_K, 1), experts)


@pytest.fixture(scope="session", params=[*Kind, "demo"])
def trace(request: pytest.FixtureRequest) -> Trace:
    """One of each kind."""
    return request.getfixturevalue("demo_trace") if request.param == "demo" else synthetic(request.param)
