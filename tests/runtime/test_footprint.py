"""What layers remember and hold: what is allocated for it, and the order of magnitude that was measured."""

from dataclasses import replace

import pytest

from mosaic.format.spec import Mixer
from mosaic.runtime.footprint import (
    attention_layers,
    device_scratch_nbytes,
    host_scratch_nbytes,
    kv_nbytes,
    state_nbytes,
)
from mosaic.runtime.kv import PAGE_TOKENS, KVFormat, KVPool
from mosaic.runtime.simulator.sizes import published
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import Weights

SPEC = published().spec
DENSE = replace(SPEC, moe=replace(SPEC.moe, num_experts=0))
LINEAR, FULL = SPEC.layers[:1], SPEC.layers[3:4]


def test_the_published_layers():
    assert attention_layers(SPEC.layers) == 10
    assert kv_nbytes(SPEC, SPEC.layers, KVFormat.BF16) == 10 * 2 * 2 * 256 * 2
    assert kv_nbytes(SPEC, SPEC.layers[:3], KVFormat.BF16) == 0
    assert state_nbytes(SPEC, FULL) == 0
    assert state_nbytes(SPEC, SPEC.layers[:5]) == 4 * 4 * (32 * 128 * 128 + 3 * 8192)


@pytest.mark.parametrize("kv", KVFormat)
def test_it_is_what_is_allocated(tiny, kv):
    spec = Weights(tiny).spec
    page = KVPool(spec.attention.num_kv_heads, spec.attention.head_dim, kv).allocate()
    assert kv_nbytes(spec, spec.layers[1:2], kv) * PAGE_TOKENS == page.values.nbytes + page.scales.nbytes
    assert spec.layers[1].mixer is Mixer.FULL_ATTENTION
    assert state_nbytes(spec, spec.layers[:1]) == DeltaState(spec.gated_delta).nbytes


def test_host_scratch_grows_with_the_prompt_and_the_experts():
    """The true shape: some 0.35 MB for each token of a chunk (docs/LOG.md)."""
    few, many = (host_scratch_nbytes(SPEC, SPEC.layers, tokens, 0.0) for tokens in (512, 1024))
    assert many == 2 * few
    assert 0.3e6 < many / 1024 < 0.45e6
    assert host_scratch_nbytes(SPEC, SPEC.layers, 1024, 1.0) > many


@pytest.mark.parametrize("scratch", [lambda *given: host_scratch_nbytes(*given, 1.0), device_scratch_nbytes])
def test_scratch_is_that_of_the_largest_layer(scratch):
    linear, full, both, none = (scratch(DENSE, layers, 256) for layers in (LINEAR, FULL, SPEC.layers, ()))
    assert 0 < none < min(linear, full)
    assert max(linear, full) == both
    assert scratch(SPEC, (), 256) > none  # experts of any layer are computed


@pytest.mark.parametrize(
    ("spec", "layers", "values"),
    [
        (DENSE, LINEAR, 2 * 8192 + 2 * 4096 + 32 * 2 * 64),  # projected, convolved; z, read; two matrices of each chunk
        (DENSE, FULL, 2 * 4096 + 2 * 512 + 3 * 4096),  # projected; found, gated, split
        (SPEC, (), 2 * 9 * 2048),  # outputs of nine, and what the host computed of them
    ],
    ids=["linear", "full", "experts"],
)
def test_device_scratch_holds_what_surely_is_there_at_once(spec, layers, values):
    """Beside the sum and its input to a product, as float32 and split."""
    surely = 4 * 256 * (3 * SPEC.hidden_size + values)
    assert surely < device_scratch_nbytes(spec, layers, 256) < 1.5 * surely


def test_a_chunk_that_is_begun_takes_as_much_as_a_whole_one():
    whole, begun, further = (device_scratch_nbytes(DENSE, LINEAR, tokens) for tokens in (64, 65, 66))
    assert begun - whole > 4 * 32 * 2 * 64 * 64 > further - begun
