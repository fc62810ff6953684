"""Attention of new tokens over paged keys and values. Here: of one token.

A program for each KV head and segment of 512 positions; segments are by absolute position and merged in order, so the
bits do not depend on how many there can be. Several tokens: `attention_tiles`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.ops.cuda.attention_sums import absorb, key_rows
from mosaic.runtime.ops.cuda.attention_tiles import attend_tiles
from mosaic.runtime.ops.cuda.pages import PAGE, Pages, read_rows

SEGMENT = tl.constexpr(8 * PAGE_TOKENS)  # positions of a program
STEP = tl.constexpr(PAGE_TOKENS // 4)  # positions at a time
LEAST_QUERIES = 16  # rows of a product


@triton.jit
def _segment(
    query: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    highest: tl.tensor,
    mass: tl.tensor,
    kv_heads: int,
    group: int,
    scale: float,
    dim: tl.constexpr,
    queries: tl.constexpr,
) -> None:
    kv_head, segment, length = tl.program_id(0), tl.program_id(1), tl.load(lengths) + 1
    begin = segment * SEGMENT
    if begin < length:
        place, column = tl.arange(0, queries), tl.arange(0, dim)
        used = place < group
        head = kv_head * group + place
        asked = tl.load(query + head[:, None] * dim + column[None, :], mask=used[:, None], other=0.0) * scale
        top = tl.full((queries,), -float("inf"), tl.float32)
        whole = tl.zeros((queries,), tl.float32)
        total = tl.zeros((queries, dim), tl.float32)
        for start in range(begin, tl.minimum(begin + SEGMENT, length), STEP):
            token = start + tl.arange(0, STEP)
            seen, keys = token < length, key_rows(table, token, start, kv_heads, kv_head)
            key = read_rows(values, scales, keys, seen, column, dim)
            scores = tl.where(seen[None, :], tl.dot(asked, tl.trans(key), input_precision="ieee"), -float("inf"))
            value = read_rows(values, scales, keys + PAGE * kv_heads, seen, column, dim)
            top, whole, total = absorb(scores, value, top, whole, total)
        row = segment * kv_heads * group + head
        tl.store(highest + row, top, mask=used)
        tl.store(mass + row, whole, mask=used)
        tl.store(sums + row[:, None] * dim + column[None, :], total, mask=used[:, None])


@triton.jit
def _merge(
    sums: tl.tensor,
    highest: tl.tensor,
    mass: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    heads: int,
    dim: tl.constexpr,
) -> None:
    head, column = tl.program_id(0), tl.arange(0, dim)
    segments = tl.cdiv(tl.load(lengths) + 1, SEGMENT)
    top = tl.load(highest + head)
    for segment in range(1, segments):
        top = tl.maximum(top, tl.load(highest + segment * heads + head))
    whole, total = 0.0, tl.zeros((dim,), tl.float32)
    for segment in range(segments):
        row = segment * heads + head
        share = tl.exp(tl.load(highest + row) - top)
        whole += share * tl.load(mass + row)
        total += share * tl.load(sums + row * dim + column)
    tl.store(out + head * dim + column, total / whole)


def attend(query: Tensor, pages: Pages) -> Tensor:
    """Causal attention of T new tokens, whose keys and values are stored: query [T, h, d] float32; [T, h, d].

    Token i sees itself and all before it, pages.length + i + 1 positions.
    """
    (tokens, heads, dim), kv_heads = query.shape, pages.values.shape[3]
    assert pages.values.shape[4] == dim, (query.shape, pages.values.shape)
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert query.dtype == torch.float32, query.dtype
    return _attend_one(query, pages) if tokens == 1 else attend_tiles(query, pages)


def _attend_one(query: Tensor, pages: Pages) -> Tensor:
    (_, heads, dim), kv_heads = query.shape, pages.values.shape[3]
    group, segments = heads // kv_heads, triton.cdiv(len(pages.table) * PAGE_TOKENS, SEGMENT.value)
    sums = torch.empty(segments, heads, dim, device=query.device)
    highest, mass = (torch.empty(segments, heads, device=query.device) for _ in range(2))
    out = torch.empty(1, heads, dim, device=query.device)
    parts = sums, highest, mass
    memory = pages.values, pages.scales, pages.table, pages.length
    sizes = {"kv_heads": kv_heads, "group": group, "scale": dim**-0.5, "dim": dim}
    queries = max(LEAST_QUERIES, triton.next_power_of_2(group))
    _segment[kv_heads, segments](
        query.contiguous(), *memory, *parts, **sizes, queries=queries, num_warps=8, num_stages=1
    )
    _merge[heads,](*parts, pages.length, out, heads=heads, dim=dim, num_warps=4)
    return out
