"""Memory of sequences on a device: where page tables lie, and what is written to them."""

from itertools import pairwise

import pytest
import torch

from mosaic.runtime.device.memory import Memory
from mosaic.runtime.device.states import DevicePool
from mosaic.runtime.kv import PAGE_TOKENS, KVFormat
from mosaic.runtime.simulator.sizes import published

SEQUENCES = 3


def pool(context):
    memory = Memory(torch.device("cpu"))
    return DevicePool(published().spec, KVFormat.E4M3, memory, layers=2, sequences=SEQUENCES, context=context)


@pytest.mark.parametrize("context", [1, PAGE_TOKENS, 5 * PAGE_TOKENS])
def test_tables_and_counts_are_aligned(context):
    """Each at a multiple of 16 bytes, as kernels are compiled for, and none in another's place."""
    lender = pool(context)
    caches = [lender.cache() for _ in range(2 * SEQUENCES)]
    for cache in caches:
        cache.reserve(context)
    parts = [part for cache in caches for part in (cache.table, cache.count)]
    assert {part.data_ptr() % 16 for part in parts} == {0}
    spans = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert {len(cache.table) for cache in caches} == {len(caches[0].pages)}
