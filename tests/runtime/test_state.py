"""The paged KV cache, snapshots and release: what was stored is read, and nothing else."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.reference import ReferenceOps
from mosaic.runtime.state import PAGE_TOKENS, DeltaState, KVCache, KVFormat, KVPool
from mosaic.runtime.weights import Weights

HEADS, DIM = 2, 16
FORMATS = list(KVFormat)
IDS = np.random.default_rng(5).integers(0, 256, 400).tolist()


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
        cache.append(*(part[first:last] for part in rows))
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
@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 127, 128, 129, 150])
def test_after_a_cut_other_tokens_follow(kv, cut):
    rows, others = random_rows(150, 3), random_rows(100, 4)
    cache = filled(KVPool(HEADS, DIM, kv), rows, [])
    cache.cut(cut)
    assert cache.length == cut
    cache.append(*others)
    joined = tuple(torch.cat((old[:cut], new)) for old, new in zip(rows, others, strict=True))
    assert_reads(cache, joined, kv)


def pages_of(pool: KVPool) -> int:
    """Those in use."""
    return len(pool._pages) - len(pool._free)


@pytest.mark.parametrize("kv", FORMATS)
def test_pages_are_used_again_after_cut_and_release(kv):
    pool = KVPool(HEADS, DIM, kv)
    cache = filled(pool, random_rows(3 * PAGE_TOKENS), [])
    assert pages_of(pool) == 3
    cache.cut(PAGE_TOKENS)
    other = filled(pool, random_rows(2 * PAGE_TOKENS, 1), [])
    assert pages_of(pool) == 3
    assert_reads(cache, tuple(part[:PAGE_TOKENS] for part in random_rows(3 * PAGE_TOKENS)), kv)
    assert_reads(other, random_rows(2 * PAGE_TOKENS, 1), kv)
    cache.cut(0)
    other.cut(0)
    rows = random_rows(3 * PAGE_TOKENS, 2)
    assert_reads(filled(pool, rows, [10]), rows, kv)
    assert pages_of(pool) == 3


@pytest.mark.parametrize("kv", FORMATS)
def test_what_a_page_held_before_does_not_shine_through(kv):
    """Pages come back full of NaN; a partly filled one must not show it."""
    pool = KVPool(HEADS, DIM, kv)
    first = filled(pool, random_rows(PAGE_TOKENS), [])
    pool._pages[0][0].fill_(float("nan"))
    if kv is KVFormat.E4M3:
        pool._pages[0][1].fill_(float("nan"))
    first.cut(0)
    rows = random_rows(5, 1)
    cache = filled(pool, rows, [2])
    assert pages_of(pool) == 1
    assert_reads(cache, rows, kv)


@pytest.mark.parametrize("kv", FORMATS)
def test_interleaved_caches_do_not_disturb_each_other(kv):
    pool = KVPool(HEADS, DIM, kv)
    rows = [random_rows(150, seed) for seed in range(3)]
    caches = [KVCache(pool) for _ in rows]
    for first in range(0, 150, 7):
        for cache, (key, value) in zip(caches, rows, strict=True):
            cache.append(key[first : first + 7], value[first : first + 7])
    for cache, own in zip(caches, rows, strict=True):
        assert_reads(cache, own, kv)


def test_what_was_read_does_not_change_with_later_tokens():
    cache = filled(KVPool(HEADS, DIM, KVFormat.F32), random_rows(10), [])
    key, value = cache.read()
    before = key.clone(), value.clone()
    cache.append(*random_rows(10, 1))
    cache.cut(3)
    cache.append(*random_rows(10, 2))
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


@pytest.fixture(scope="module", params=[KVFormat.F32, KVFormat.E4M3])
def model(request, tiny) -> HybridModel:
    return HybridModel(Weights(tiny), ReferenceOps(), request.param)


def logits_after(model: HybridModel, ids: list[int], state) -> torch.Tensor:
    return model.logits(model.hidden(ids, state)[-1:])[0]


def pool_of(state) -> KVPool:
    return next(layer for layer in state.layers if isinstance(layer, KVCache))._pool


@pytest.mark.parametrize("kept", [0, 1, 3, 64, 70, 140])
def test_restored_and_continued_otherwise_is_a_fresh_run(model, kept):
    """To the bit: the same calls on the same states. Restored twice, and over a page more than was kept."""
    fresh, state = model.new_sequence(), model.new_sequence()
    for sequence in (fresh, state):
        if kept:
            model.hidden(IDS[:kept], sequence)
    expected = [logits_after(model, IDS[200:205], fresh), logits_after(model, IDS[7:8], fresh)]
    snapshot = state.snapshot()
    for detour in (IDS[100:201], IDS[300:302]):
        model.hidden(detour, state)
        model.hidden(detour[:1], state)
        state.restore(snapshot)
        assert state.length == kept
        assert {layer.position for layer in state.layers if isinstance(layer, DeltaState)} == {kept}
        found = [logits_after(model, IDS[200:205], state), logits_after(model, IDS[7:8], state)]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    state.release()
    fresh.release()


def test_a_snapshot_stays_as_it_was(model):
    state = model.new_sequence()
    model.hidden(IDS[:10], state)
    snapshot = state.snapshot()
    before = [(conv.clone(), recurrent.clone()) for conv, recurrent in snapshot.delta]
    model.hidden(IDS[10:30], state)
    model.hidden(IDS[30:31], state)
    assert len(before) == 2
    for (conv, recurrent), (old_conv, old_recurrent) in zip(snapshot.delta, before, strict=True):
        assert torch.equal(conv, old_conv)
        assert torch.equal(recurrent, old_recurrent)
    state.release()


def test_interleaved_sequences_answer_as_alone(model):
    alone = []
    for start in (0, 150):
        state = model.new_sequence()
        alone.append([logits_after(model, IDS[i : i + 8], state) for i in range(start, start + 72, 8)])
        state.release()
    both = [model.new_sequence(), model.new_sequence()]
    for step in range(9):
        for number, start in enumerate((0, 150)):
            ids = IDS[start + 8 * step : start + 8 * step + 8]
            assert torch.equal(logits_after(model, ids, both[number]), alone[number][step])
    for state in both:
        state.release()


def test_a_released_sequence_gives_all_its_pages_back(model):
    state = model.new_sequence()
    model.hidden(IDS[:130], state)
    pool = pool_of(state)
    state.release()
    assert sorted(pool._free) == list(range(len(pool._pages)))
    again = model.new_sequence()
    count = len(pool._pages)
    model.hidden(IDS[:130], again)
    assert len(pool._pages) == count
    again.release()


def test_a_new_state_is_zero(model):
    for layer in model.new_sequence().layers:
        if isinstance(layer, DeltaState):
            assert not layer.conv.any()
            assert not layer.recurrent.any()
        else:
            assert layer.length == 0


def test_a_snapshot_cannot_be_written_to(model):
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.new_sequence().snapshot().length = 3
