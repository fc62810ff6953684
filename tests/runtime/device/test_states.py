"""Memory of sequences on a device: where page tables lie, and what is written to them."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Copies(TorchDispatchMode):
    """Counts what makes a GPU wait for the host's memory."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += "copy" in function.name()
        return function(*arguments, **(keywords or {}))


def test_pages_are_numbered_without_a_copy():
    """In whatever order they come from the pool, and of a sequence that was resumed."""
    lender = pool(9 * PAGE_TOKENS)
    one, other = lender.cache(), lender.cache()
    with Copies() as copies:
        for pages in (3, 1, 2):
            one.reserve(pages * PAGE_TOKENS)
            other.reserve(PAGE_TOKENS)
    twin = one.fork(6 * PAGE_TOKENS)
    with copies:
        twin.reserve(2 * PAGE_TOKENS)
    assert copies.count == 0
    numbers = [[page.number for page in cache.pages] for cache in (one, other, twin)]
    assert numbers == [[0, 1, 2, 4, 6, 7], [3, 5, 8], [0, 1, 2, 4, 6, 7, 9, 10]]
    for cache, expected in zip((one, other, twin), numbers, strict=True):
        assert cache.table[: len(expected)].tolist() == expected
    with copies:
        one.table[0] = torch.tensor(5)
    assert copies.count == 1
