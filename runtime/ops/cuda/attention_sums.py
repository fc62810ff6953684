"""Attention's sums over positions, step after step: what kernels call, nothing that is launched."""

import triton
import triton.language as tl

from mosaic.runtime.ops.cuda.pages import PAGE


@triton.jit
def key_rows(table: tl.tensor, tokens: tl.tensor, start: int, kv_heads: int, kv_head: int) -> tl.tensor:
    """Rows of the pool with the keys of tokens that are of one page, that of `start`."""
    page = tl.load(table + start // PAGE).to(tl.int64)
    return (page * 2 * PAGE + tokens % PAGE) * kv_heads + kv_head


@triton.jit
def absorb(
    scores: tl.tensor, values: tl.tensor, top: tl.tensor, whole: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`top`, `whole` and `total` with so many more positions: scores [queries, positions], values [positions, d].

    The highest score [queries], the sum of exp(score - highest), and that of the values times these [queries, d]. A
    score of -inf changes nothing, not a bit, once there has been another.
    """
    risen = tl.maximum(top, tl.max(scores, axis=1))
    kept = tl.exp(top - risen)
    shares = tl.exp(scores - risen[:, None])
    whole = whole * kept + tl.sum(shares, axis=1)
    return risen, whole, total * kept[:, None] + tl.dot(shares, values, input_precision="ieee")
