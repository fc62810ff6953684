"""Attention of one token over paged keys and values, and the gate of its output.

A program for each KV head and segment of 512 positions; segments are by absolute position and merged in order, so the
bits do not depend on how many run at once. The length stays on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.ops.cuda.decode import FROM_HALF, weights_at

PAGE = tl.constexpr(PAGE_TOKENS)
SEGMENT = tl.constexpr(8 * PAGE_TOKENS)  # positions of a program
STEP = tl.constexpr(PAGE_TOKENS // 4)  # positions at a time
LEAST_QUERIES = 16  # rows of a product


@dataclass(frozen=True)
class Pages:
    """Keys and values of a sequence: pages of a pool on the device.

    `values` [P, 2 (key, value), 64, kv heads, d] float32, bfloat16, or E4M3 codes (uint8) with `scales` float32
    [P, 2, 64, kv heads, 1]; `table` int32 [n]: the sequence's pages in order; `length` int32 [1]: its tokens.
    """

    values: Tensor
    scales: Tensor | None
    table: Tensor
    length: Tensor


@triton.jit
def _read(values: tl.tensor, scales: tl.tensor, rows: tl.tensor, wanted: tl.tensor, dim: tl.constexpr) -> tl.tensor:
    """Rows of the pool that are wanted, float32 [STEP, dim]; the others are 0."""
    places = values + rows[:, None] * dim + tl.arange(0, dim)[None, :]
    result = weights_at(places, wanted[:, None])
    if scales is not None:
        result *= tl.load(scales + rows, mask=wanted, other=0.0)[:, None] * FROM_HALF
    return result


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
    kv_head, segment, length = tl.program_id(0), tl.program_id(1), tl.load(lengths)
    place, column = tl.arange(0, queries), tl.arange(0, dim)
    used = place < group
    head = kv_head * group + place
    asked = tl.load(query + head[:, None] * dim + column[None, :], mask=used[:, None], other=0.0) * scale
    top = tl.full((queries,), -float("inf"), tl.float32)
    whole = tl.zeros((queries,), tl.float32)
    total = tl.zeros((queries, dim), tl.float32)
    begin = segment * SEGMENT
    for start in range(begin, tl.minimum(begin + SEGMENT, length), STEP):
        token = start + tl.arange(0, STEP)
        seen = token < length
        page = tl.load(table + start // PAGE).to(tl.int64)
        keys = (page * 2 * PAGE + token % PAGE) * kv_heads + kv_head
        key = _read(values, scales, keys, seen, dim)
        scores = tl.where(seen[None, :], tl.dot(asked, tl.trans(key), input_precision="ieee"), -float("inf"))
        risen = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp(top - risen)
        shares = tl.exp(scores - risen[:, None])
        value = _read(values, scales, keys + PAGE * kv_heads, seen, dim)
        whole = whole * kept + tl.sum(shares, axis=1)
        total = total * kept[:, None] + tl.dot(shares, value, input_precision="ieee")
        top = risen
    row = segment * kv_heads * group + head
    tl.store(highest + row, top, mask=used)
    tl.store(mass + row, whole, mask=used)
    tl.store(sums + row[:, None] * dim + column[None, :], total, mask=used[:, None])


@triton.jit
def _merge(
    sums: tl.tensor,
    highest: tl.tensor,
    mass: tl.tensor,
    gate: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    heads: int,
    gate_stride: int,
    dim: tl.constexpr,
) -> None:
    head, column = tl.program_id(0), tl.arange(0, dim)
    segments = tl.cdiv(tl.load(lengths), SEGMENT)
    top = tl.load(highest + head)
    for segment in range(1, segments):
        top = tl.maximum(top, tl.load(highest + segment * heads + head))
    whole, total = 0.0, tl.zeros((dim,), tl.float32)
    for segment in range(segments):
        row = segment * heads + head
        share = tl.exp(tl.load(highest + row) - top)
        whole += share * tl.load(mass + row)
        total += share * tl.load(sums + row * dim + column)
    total = total / whole
    if gate is not None:
        total *= tl.sigmoid(tl.load(gate + head * gate_stride + column))
    tl.store(out + head * dim + column, total)


def attend(query: Tensor, pages: Pages, gate: Tensor | None) -> Tensor:
    """Attention of the last of the tokens in `pages` (at least one): query [h, d] float32; [h, d].

    With `gate` [h, d] times sigmoid(gate). d is a power of two.
    """
    (heads, dim), (_, _, page, kv_heads, _) = query.shape, pages.values.shape
    assert pages.values.shape[1:] == (2, PAGE_TOKENS, kv_heads, dim), (query.shape, pages.values.shape)
    assert page == PAGE_TOKENS
    assert (pages.values.dtype == torch.uint8) == (pages.scales is not None)
    assert pages.table.dtype == pages.length.dtype == torch.int32
    assert gate is None or (gate.shape == query.shape and gate.stride(1) == 1)
    assert heads % kv_heads == 0, (heads, kv_heads)
    group, segments = heads // kv_heads, triton.cdiv(len(pages.table) * PAGE_TOKENS, SEGMENT.value)
    sums = torch.empty(segments, heads, dim, device=query.device)
    highest, mass = (torch.empty(segments, heads, device=query.device) for _ in range(2))
    out = torch.empty(heads, dim, device=query.device)
    parts = sums, highest, mass
    memory = pages.values, pages.scales, pages.table, pages.length
    sizes = {"kv_heads": kv_heads, "group": group, "scale": dim**-0.5, "dim": dim}
    queries = max(LEAST_QUERIES, triton.next_power_of_2(group))
    _segment[kv_heads, segments](
        query.contiguous(), *memory, *parts, **sizes, queries=queries, num_warps=8, num_stages=1
    )
    stride = 0 if gate is None else gate.stride(0)
    _merge[heads,](*parts, gate, pages.length, out, heads=heads, gate_stride=stride, dim=dim, num_warps=4)
    return out
