"""Keys and values in pages, and attention over them: of one token and of many."""

import numpy as np
import pytest
import torch

from mosaic.format import e4m3
from mosaic.runtime.kv import PAGE_TOKENS, KVCache, KVFormat, KVPool
from mosaic.runtime.ops.cuda.attention import STEP, attend
from mosaic.runtime.ops.cuda.pages import Pages, store
from mosaic.runtime.ops.reference import ReferenceOps
from support.gpu_weights import normal
from support.rounding import UNIT, Rounded
from support.states import append

OPS = ReferenceOps()
KINDS = {KVFormat.F32: torch.float32, KVFormat.BF16: torch.bfloat16, KVFormat.E4M3: torch.uint8}
SHAPES = [(6, 2, 32), (4, 4, 16)]


def filled(kv, length, kv_heads, dim):
    """Its last key is a long one: for some heads that has by far the highest score, and not in the first segment."""
    cache, keys = KVCache(KVPool(kv_heads, dim, kv)), normal(length, kv_heads, dim, seed=1)
    keys[-1] *= 100
    append(cache, keys, normal(length, kv_heads, dim, seed=2))
    return cache


def pages_for(cache, device, count, length, spare=3):
    """`count` pages for such tokens in a pool that is full of NaN, in any order, and room in the table for more."""
    codes, shape = cache.format is KVFormat.E4M3, (count + spare, *cache.pool.page_shape)
    places = torch.randperm(count + spare, generator=torch.Generator().manual_seed(0))[:count]
    kind = KINDS[cache.format]
    values = torch.full(shape, e4m3.NAN_CODE if codes else torch.nan, dtype=kind, device=device)
    scales = torch.full((*shape[:-1], 1), torch.nan, device=device) if codes else None
    table = torch.cat((places, torch.full((9,), 10**6))).int()
    return Pages(values, scales, table.to(device), torch.tensor([length], dtype=torch.int32, device=device))


def pages_of(cache, device, new):
    """Pages that hold what the cache holds; the last `new` tokens are to be attended for."""
    pages = pages_for(cache, device, len(cache.pages), cache.length - new)
    for number, page in enumerate(cache.pages):
        place, seen = pages.table[number], min(PAGE_TOKENS, cache.length - PAGE_TOKENS * number)
        pages.values[place, :, :seen] = page.values.view(pages.values.dtype)[:, :seen].to(device)
        if pages.scales is not None:
            pages.scales[place, :, :seen] = page.scales[:, :seen].to(device)
    return pages


def same_bits(found, expected):
    """Of two `Pages`, NaN included."""
    pairs = [(found.values, expected.values)]
    pairs += [] if found.scales is None else [(found.scales, expected.scales)]
    return all(np.array_equal(*(part.cpu().view(torch.uint8).numpy() for part in pair)) for pair in pairs)


@pytest.mark.parametrize("kv", KVFormat)
@pytest.mark.parametrize(("length", "new"), [(0, 1), (63, 2), (64, 1), (0, 70)])
def test_stored_is_what_the_host_stores(length, new, kv, device):
    """And nothing else is written: all around stays NaN."""
    rows = normal(2, length + new, 2, 32, seed=3) * torch.exp2(normal(2, length + new, 2, 1, seed=4, size=30.0))
    rows[:, -1, 0] = 0
    rows[0, -1, 1] *= 2.0**-140  # its scale is subnormal, or 0
    cache = KVCache(KVPool(2, 32, kv))
    append(cache, *rows)
    pages = pages_for(cache, device, len(cache.pages), 0)
    for first, last in ((0, length), (length, length + new)):
        if first < last:
            pages.length.fill_(first)
            store(*(part[first:last].to(device) for part in rows), pages)
    assert pages.length.item() == length
    assert same_bits(pages, pages_of(cache, device, new))


@pytest.mark.parametrize("kv", [KVFormat.E4M3, KVFormat.BF16])
def test_rounding_to_the_nearest(kv, device):
    """Between all neighbours: halves, which go to the even one, and the float32 on either side."""
    if kv is KVFormat.E4M3:
        ends = np.unique(e4m3.VALUES[np.isfinite(e4m3.VALUES)].astype(np.float32))
    else:
        ends = (np.arange(0x3F00, 0x4100, dtype=np.uint32) << 16).view(np.float32)
    halves = (ends[:-1] + ends[1:]) / 2
    sides = [np.nextafter(halves, np.float32(side) * np.inf, dtype=np.float32) for side in (-1, 1)]
    every = torch.from_numpy(np.concatenate((ends, halves, *sides)))
    every = torch.cat((every, torch.zeros(-len(every) % 31))).view(-1, 1, 31)
    rows = torch.cat((torch.full((len(every), 1, 1), e4m3.E4M3_MAX), every), dim=-1)  # a scale of 1
    cache = KVCache(KVPool(1, 32, kv))
    append(cache, rows, -rows)
    pages = pages_for(cache, device, len(cache.pages), 0)
    store(rows.to(device), -rows.to(device), pages)
    assert same_bits(pages, pages_of(cache, device, 0))


def attended(query, cache):
    """Of the last tokens, [T, h, d]."""
    first = cache.length - len(query)
    return Rounded.stack([attended_one(row, cache, first + place + 1) for place, row in enumerate(query)])


def attended_one(query, cache, seen):
    """Shares of the softmax, and values, with what the merging of steps and segments adds to the roundings."""
    heads, dim = query.shape
    keys, values = (part.double().numpy()[:seen] for part in cache.read())
    results = []
    for head in range(heads):
        kv_head = head // (heads // cache.kv_heads)
        asked = Rounded(query[head].double().numpy()) * Rounded(dim**-0.5, UNIT * dim**-0.5)
        scores = asked.dot(keys[:, kv_head])
        shares = (scores - scores.value.max()).exp()
        # The highest score so far is another one than that of all; what was added up is scaled down to the new one
        # at most once a step, and once more when segments are merged.
        reach = scores.value.max() - scores.value.min() + 2 * scores.error.max()
        scaled = (len(keys) // STEP.value + 2) * 9 + 4 * reach
        shares = Rounded(shares.value, shares.error + shares.value * scaled * UNIT)
        total = (shares[:, None] * Rounded(values[:, kv_head])).sum(0)
        results.append(total * shares.sum(0).reciprocal())
    return Rounded.stack(results)


@pytest.mark.parametrize("kv", KVFormat)
@pytest.mark.parametrize("length", [1, 15, 64, 65, 600])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_one_token(heads, kv_heads, dim, length, kv, device):
    cache, query = filled(kv, length, kv_heads, dim), normal(1, heads, dim, size=3.0)
    expected = attended(query, cache)
    expected.agrees(OPS.attend(query, *cache.read()))
    expected.holds(attend(query.to(device), pages_of(cache, device, 1)))


@pytest.mark.parametrize("kv", KVFormat)
@pytest.mark.parametrize(("length", "tokens"), [(2, 2), (9, 9), (65, 3), (80, 21)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [*SHAPES, (40, 1, 16)])
def test_many_tokens(heads, kv_heads, dim, length, tokens, kv, device):
    """Of `length` in all, the first ones of a sequence among them: groups of 3, 1 and 40, tiles that are not full."""
    cache, query = filled(kv, length, kv_heads, dim), normal(tokens, heads, dim, size=3.0)
    expected = attended(query, cache)
    expected.agrees(OPS.attend(query, *cache.read()))
    expected.holds(attend(query.to(device), pages_of(cache, device, tokens)))


def test_a_token_has_the_same_bits_in_any_company(device):
    """Of others, however long the last key is, and of room in the table."""
    cache, query = filled(KVFormat.E4M3, 90, 2, 32), normal(30, 6, 32, size=3.0).to(device)
    pages = pages_of(cache, device, 30)
    whole = attend(query, pages)
    for first, last in ((0, 2), (3, 30), (5, 22)):
        pages.length.fill_(60 + first)
        assert torch.equal(attend(query[first:last], pages), whole[first:last])
    roomy = Pages(pages.values, pages.scales, torch.cat((pages.table, pages.table)), pages.length)
    assert torch.equal(attend(query[5:6], pages), attend(query[5:6], roomy))


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_of_queries_may_have_gaps(tokens, device):
    """As those of a projection to queries and gates."""
    cache, both = filled(KVFormat.BF16, 70, 2, 32), normal(tokens, 6, 64, size=2.0).to(device)
    query, pages = both.chunk(2, dim=-1)[0], pages_of(cache, device, tokens)
    assert not query.is_contiguous()
    assert torch.equal(attend(query, pages), attend(query.contiguous(), pages))
