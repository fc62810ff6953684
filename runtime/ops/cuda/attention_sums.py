"""Attention's sums over positions, one step after the other: what kernels call, nothing that is launched."""

import triton
import triton.language as tl

from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.ops.cuda.pages import PAGE, read_rows

STEP = tl.constexpr(PAGE_TOKENS // 4)  # positions at a time


@triton.jit
def softmax_sums(
    asked: tl.tensor,
    limits: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    begin: int,
    end: int,
    kv_heads: int,
    kv_head: int,
    rows: tl.constexpr,
    dim: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of queries [rows, dim], scaled, over positions [begin, end), of which row r sees those below limits[r].

    Returns the highest score [rows], the sum of exp(score - highest) [rows], and that of the values times these [rows,
    dim]. Each row sees at least the first position; `begin` is a multiple of STEP. A row's bits do not depend on `end`,
    nor on other rows.
    """
    top = tl.full((rows,), -float("inf"), tl.float32)
    whole = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, dim), tl.float32)
    for start in range(begin, end, STEP):
        token = start + tl.arange(0, STEP)
        inside, seen = token < end, token[None, :] < limits[:, None]
        page = tl.load(table + start // PAGE).to(tl.int64)
        keys = (page * 2 * PAGE + token % PAGE) * kv_heads + kv_head
        key = read_rows(values, scales, keys, inside, dim)
        scores = tl.where(seen, tl.dot(asked, tl.trans(key), input_precision="ieee"), -float("inf"))
        risen = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp(top - risen)
        shares = tl.exp(scores - risen[:, None])
        value = read_rows(values, scales, keys + PAGE * kv_heads, inside, dim)
        whole = whole * kept + tl.sum(shares, axis=1)
        total = total * kept[:, None] + tl.dot(shares, value, input_precision="ieee")
        top = risen
    return top, whole, total
