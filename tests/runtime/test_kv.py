"""The paged KV cache: what was stored is read, and nothing else; pages belong to those who hold them."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.runtime import kv as kv_module
from mosaic.runtime.kv import PAGE_TOKENS, KVCache, KVFormat, KVPool
from support.interrupts import InterruptAt
from support.states import append

HEADS, DIM = 2, 16
FORMATS = list(KVFormat)


def random_rows(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value [T, kv heads, d] whose heads and tokens differ widely in size: a swapped scale is felt."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 13, (2, tokens, HEADS, 1), generator=generator).float())
    both = torch.randn(2, tokens, HEADS, DIM, generator=generator) * sizes
    return both[0], both[1]


def filled(pool: KVPool, rows: tuple[torch.Tensor, torch.Tensor], cuts: list[int]) -> KVCache:
    cache = KVCache(pool)
    edges = [0, *sorted(cuts), len(rows[0])]
    for first, last in itertools.pairwise(edges):
        append(cache, *(part[first:last] for part in rows))
    return cache


def assert_reads(cache: KVCache, rows: tuple[torch.Tensor, torch.Tensor], kv: KVFormat) -> None:
    """The cache reads what a fresh one with the same rows reads."""
    expected = filled(KVPool(HEADS, DIM, kv), rows, []).read()
    for found, wanted in zip(cache.read(), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 200])
def test_f32_is_exact(tokens):
    rows = random_rows(tokens)
    for found, wanted in zip(filled(KVPool(HEADS, DIM, KVFormat.F32), rows, []).read(), rows, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)


def test_bf16_is_the_nearest_bfloat16():
    """Against rounding done in integers: add half of what is cut off, ties to even."""
    rows = random_rows(150)
    for found, wanted in zip(filled(KVPool(HEADS, DIM, KVFormat.BF16), rows, []).read(), rows, strict=True):
        bits = wanted.contiguous().numpy().view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        np.testing.assert_array_equal(found.numpy().view(np.uint32), nearest)
        assert torch.equal(found, wanted.bfloat16().float())


def test_e4m3_is_within_half_a_code_step_of_the_scale_of_its_token_and_head():
    """With s = amax/448 a code is off by at most half a step: 2^-4 relative for normal codes (3 mantissa bits), and
    s * 2^-10 below the smallest normal code 2^-6. Three float32 roundings (scale, quotient, product) shift the value
    and the place where codes change by 3 * 2^-24 relative: 1 + 2^-20 covers them.
    """
    for found, wanted in zip(
        filled(KVPool(HEADS, DIM, KVFormat.E4M3), random_rows(150), []).read(), random_rows(150), strict=True
    ):
        wanted64, scale = wanted.double(), wanted.double().abs().amax(-1, keepdim=True) / 448
        bound = torch.maximum(wanted64.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)
        error = (found.double() - wanted64).abs()
        assert (error <= bound).all()
        assert error.max() > 0
        # The largest of a head survives but for those roundings.
        largest = wanted64.abs().argmax(-1, keepdim=True)
        torch.testing.assert_close(
            found.double().gather(-1, largest), wanted64.gather(-1, largest), rtol=2**-22, atol=0
        )


def test_e4m3_follows_torch_given_the_scale():
    key, value = random_rows(20)
    for found, wanted in zip(
        filled(KVPool(HEADS, DIM, KVFormat.E4M3), (key, value), []).read(), (key, value), strict=True
    ):
        scale = wanted.abs().amax(-1, keepdim=True) / 448
        assert torch.equal(found, (wanted / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("kv", FORMATS)
def test_zeros_stay_zero(kv):
    key, value = random_rows(70)
    key[3], value[5, 1] = 0, 0
    value[66] = -0.0
    found_key, found_value = filled(KVPool(HEADS, DIM, kv), (key, value), []).read()
    assert (found_key[3] == 0).all()
    assert (found_value[5, 1] == 0).all()
    assert (found_value[66] == 0).all()
    assert found_key.isfinite().all()


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_extreme_sizes_stay_finite(kv, size):
    """1e-44 is a subnormal float32 and 3e38 near the largest; E4M3 keeps a head's largest to a subnormal step."""
    rows = torch.full((3, HEADS, DIM), size), torch.full((3, HEADS, DIM), -size)
    for found, wanted in zip(filled(KVPool(HEADS, DIM, kv), rows, []).read(), rows, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-8, atol=448 * 2.0**-149)


@pytest.mark.parametrize("kv", FORMATS)
@given(st.lists(st.integers(0, 150), max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_split_reads_the_same(kv, cuts):
    rows = random_rows(150, 2)
    assert_reads(filled(KVPool(HEADS, DIM, kv), rows, cuts), rows, kv)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 150])
def test_a_fork_and_its_origin_go_separate_ways(kv, length):
    rows, others = random_rows(150, 3), random_rows(100, 4)
    pool = KVPool(HEADS, DIM, kv)
    cache = filled(pool, rows, [])
    fork = cache.fork(length)
    assert fork.length == length
    assert pool.pages_in_use == 3 + (length % PAGE_TOKENS > 0)  # full pages are shared, all of them
    append(fork, *others)
    append(cache, *random_rows(40, 5))
    assert_reads(fork, tuple(torch.cat((old[:length], new)) for old, new in zip(rows, others, strict=True)), kv)
    assert_reads(cache, tuple(torch.cat(pair) for pair in zip(rows, random_rows(40, 5), strict=True)), kv)


@pytest.mark.parametrize("kv", FORMATS)
def test_a_fork_knows_where_its_pages_lie(kv):
    """By their addresses, which is how kernels read them, also when the list of them has to grow."""
    cache = filled(KVPool(HEADS, DIM, kv), random_rows(20 * PAGE_TOKENS + 5), [])
    fork = cache.fork(19 * PAGE_TOKENS + 5)
    append(fork, *random_rows(3 * PAGE_TOKENS, 1))
    for each in (cache, fork):
        pages, scales = each.addresses()
        assert pages.tolist() == [page.values.data_ptr() for page in each.pages]
        assert (scales is None) == (kv is not KVFormat.E4M3)
        assert scales is None or scales.tolist() == [page.scales.data_ptr() for page in each.pages]
    assert fork.pages[:19] == cache.pages[:19]


def test_a_cache_is_forked_where_it_has_been():
    with pytest.raises(AssertionError):
        filled(KVPool(HEADS, DIM, KVFormat.F32), random_rows(10), []).fork(11)


@pytest.mark.parametrize("kv", FORMATS)
def test_pages_that_nobody_holds_are_used_again(kv):
    pool = KVPool(HEADS, DIM, kv)
    cache = filled(pool, random_rows(3 * PAGE_TOKENS), [])
    memory = len(pool._places)
    kept = cache.fork(PAGE_TOKENS)
    assert pool.pages_in_use == 3
    del cache
    assert pool.pages_in_use == 1
    others = [filled(pool, random_rows(PAGE_TOKENS, seed), []) for seed in range(memory - 1)]
    assert len(pool._places) == pool.pages_in_use == memory
    assert_reads(kept, tuple(part[:PAGE_TOKENS] for part in random_rows(3 * PAGE_TOKENS)), kv)
    for seed, other in enumerate(others):
        assert_reads(other, random_rows(PAGE_TOKENS, seed), kv)
    one_more = filled(pool, random_rows(1), [])
    assert pool.pages_in_use == memory + 1
    del kept, other, others, one_more
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("kv", FORMATS)
def test_what_a_page_held_before_does_not_shine_through(kv):
    """Pages come back full of NaN; a partly filled one must not show it, nor a copy of it."""
    pool = KVPool(HEADS, DIM, kv)
    pages = [pool.allocate() for _ in range(len(pool._idle) + 1)]
    for page in pages:
        page.values.fill_(float("nan"))
        page.scales.fill_(float("nan"))
    del page, pages
    rows = random_rows(5, 1)
    cache = filled(pool, rows, [2])
    assert_reads(cache, rows, kv)
    assert_reads(cache.fork(3), tuple(part[:3] for part in rows), kv)


@pytest.mark.parametrize("kv", FORMATS)
def test_figures_of_a_page(kv):
    pool = KVPool(HEADS, DIM, kv)
    page = pool.allocate()
    assert page.values.nbytes + page.scales.nbytes == PAGE_TOKENS * pool.token_nbytes


def test_a_page_written_to_in_a_model_can_be_written_to_outside():
    """torch forbids that of tensors that were made in inference mode."""
    pool = KVPool(HEADS, DIM, KVFormat.E4M3)
    with torch.inference_mode():
        cache = filled(pool, random_rows(70), [])
    fork = cache.fork(67)
    append(fork, *random_rows(5, 1))
    assert fork.length == 72


@pytest.mark.parametrize("opcodes", [False, True])
def test_ctrl_c_anywhere_in_the_pool_neither_shares_nor_loses_a_page(opcodes):
    """Before every line, and before every instruction, of growing and forking over the ends of pages and slabs."""
    step = 0
    while True:
        step += 1
        pool = KVPool(HEADS, 2048, KVFormat.F32)  # a page is 2 MiB: each is a slab
        kept = KVCache(pool)
        append(kept, *(part.repeat(1, 1, 2048 // DIM) for part in random_rows(3)))
        before = kept.read()[0].clone()
        interrupt = InterruptAt(step, {kv_module.__file__}, opcodes=opcodes)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            pool.allocate()
            fork = kept.fork(3)
            del fork
            pool.allocate()
            kept.fork(2)
        with contextlib.suppress(NameError):
            del fork
        assert pool.pages_in_use == 1, interrupt.where
        pages = [pool.allocate() for _ in range(4)]
        assert len({page.address for page in [*pages, *kept.pages]}) == 5, interrupt.where
        assert pool.pages_in_use == 5
        for page in pages:
            page.values.fill_(7)
        assert torch.equal(kept.read()[0], before), interrupt.where
        assert len(pool._places) == 5, interrupt.where
        if not interrupt.where:
            break
    assert step > 40


@pytest.mark.parametrize("kv", FORMATS)
def test_interleaved_caches_do_not_disturb_each_other(kv):
    pool = KVPool(HEADS, DIM, kv)
    rows = [random_rows(150, seed) for seed in range(3)]
    caches = [KVCache(pool) for _ in rows]
    for first in range(0, 150, 7):
        for cache, (key, value) in zip(caches, rows, strict=True):
            append(cache, key[first : first + 7], value[first : first + 7])
    for cache, own in zip(caches, rows, strict=True):
        assert_reads(cache, own, kv)


def test_what_was_read_does_not_change_with_later_tokens():
    cache = filled(KVPool(HEADS, DIM, KVFormat.F32), random_rows(10), [])
    key, value = cache.read()
    before = key.clone(), value.clone()
    append(cache, *random_rows(10, 1))
    append(cache, *random_rows(10, 2))
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])
