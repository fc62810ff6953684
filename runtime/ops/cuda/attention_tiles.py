"""Attention of several new tokens: prompts. A program for each KV head and tile of queries, those of its whole group.

Keys and values are read once for a tile. A token's bits do not depend on how many others there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.attention_sums import absorb, key_rows
from mosaic.runtime.ops.cuda.pages import PAGE, Pages, read_rows

ROWS = 64  # queries of a program at least: those of a group for each of its tokens
STEP = 32  # positions at a time; divides a page
WIDTH = 16  # columns of queries and keys at a time: with all of them, registers do not suffice


@triton.jit
def _tile(
    query: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    tokens: int,
    kv_heads: int,
    group: int,
    scale: float,
    dim: tl.constexpr,
    members: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    width: tl.constexpr,
) -> None:
    kv_head, row, column = tl.program_id(1), tl.arange(0, rows), tl.arange(0, dim)
    first = tl.program_id(0) * (rows // members)
    token, member = first + row // members, row % members
    used = ((member < group) & (token < tokens))[:, None]
    head, far = kv_head * group + member, token.to(tl.int64)
    place = (far * kv_heads * group + head)[:, None] * dim + column[None, :]
    length, part = tl.load(lengths), tl.arange(0, width)
    parts = query + (far * kv_heads * group + head)[:, None] * dim + part[None, :]
    top = tl.full((rows,), -float("inf"), tl.float32)
    whole = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, dim), tl.float32)
    end = length + tl.minimum(first + rows // members, tokens)
    for start in range(0, end, step):
        position = start + tl.arange(0, step)
        inside, keys = position < end, key_rows(table, position, start, kv_heads, kv_head)
        scores = tl.zeros((rows, step), tl.float32)
        for begin in range(0, dim, width):
            asked = tl.load(parts + begin, mask=used, other=0.0)
            key = read_rows(values, scales, keys, inside, begin + part, dim)
            scores = tl.dot(asked, tl.trans(key), scores, input_precision="ieee")
        seen = position[None, :] <= (length + token)[:, None]
        value = read_rows(values, scales, keys + PAGE * kv_heads, inside, column, dim)
        top, whole, total = absorb(tl.where(seen, scores * scale, -float("inf")), value, top, whole, total)
    tl.store(out + place, total / whole[:, None], mask=used)


def attend_tiles(query: Tensor, pages: Pages) -> Tensor:
    """See `attention.attend`."""
    (tokens, heads, dim), kv_heads = query.shape, pages.values.shape[3]
    group = heads // kv_heads
    members = triton.next_power_of_2(group)
    rows = max(ROWS, members)
    out = torch.empty(tokens, heads, dim, device=query.device)
    memory = pages.values, pages.scales, pages.table, pages.length
    _tile[triton.cdiv(tokens, rows // members), kv_heads](
        query.contiguous(),
        *memory,
        out,
        tokens,
        kv_heads,
        group,
        dim**-0.5,
        dim=dim,
        members=members,
        rows=rows,
        step=STEP,
        width=WIDTH,
        num_warps=8,
        num_stages=1,
    )
    return out
