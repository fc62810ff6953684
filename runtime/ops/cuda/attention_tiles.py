"""Attention of several new tokens: prompts. A program for each KV head and tile of queries, those of its whole group.

Keys and values are read once for a tile. A token's bits do not depend on how many others there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops.cuda.attention_sums import softmax_sums
from mosaic.runtime.ops.cuda.pages import Pages

ROWS = 32  # queries of a program at least: a group's for each of its tokens


@triton.jit
def _tile(
    query: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    tokens: int,
    kv_heads: int,
    group: int,
    gate_token: int,
    gate_head: int,
    scale: float,
    dim: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    kv_head, row, column = tl.program_id(1), tl.arange(0, rows), tl.arange(0, dim)
    first = tl.program_id(0) * (rows // width)
    token, member = first + row // width, row % width
    used = ((member < group) & (token < tokens))[:, None]
    head, far = kv_head * group + member, token.to(tl.int64)
    place = (far * kv_heads * group + head)[:, None] * dim + column[None, :]
    asked = tl.load(query + place, mask=used, other=0.0) * scale
    length = tl.load(lengths)
    limits, end = length + 1 + token, length + tl.minimum(first + rows // width, tokens)
    _, whole, total = softmax_sums(asked, limits, values, scales, table, 0, end, kv_heads, kv_head, rows, dim)
    total = total / whole[:, None]
    if gate is not None:
        places = (far * gate_token + head * gate_head)[:, None] + column[None, :]
        total *= tl.sigmoid(tl.load(gate + places, mask=used, other=0.0))
    tl.store(out + place, total, mask=used)


def attend_tiles(query: Tensor, pages: Pages, gate: Tensor | None) -> Tensor:
    """See `attention.attend`."""
    (tokens, heads, dim), kv_heads = query.shape, pages.values.shape[3]
    group = heads // kv_heads
    width = triton.next_power_of_2(group)
    rows = max(ROWS, width)
    out = torch.empty(tokens, heads, dim, device=query.device)
    strides = (0, 0) if gate is None else gate.stride()[:2]
    memory = pages.values, pages.scales, pages.table, pages.length
    _tile[triton.cdiv(tokens, rows // width), kv_heads](
        query.contiguous(),
        *memory,
        gate,
        out,
        tokens,
        kv_heads,
        group,
        *strides,
        dim**-0.5,
        dim=dim,
        width=width,
        rows=rows,
        num_warps=8,
        num_stages=1,
    )
    return out
