"""Gated DeltaNet for several tokens: prompts. The delta rule in its chunked form, chunks of 64 from the first token on.

What does not depend on the state is worked out for all chunks at once, a program for each and head. The state then
walks through the chunks, a program for each head and tile of its columns. Maths: docs/MODELS.md, section 3; `writes` is
its U, `reads` its W, `shares` (q k^T) D, `since` exp(G) and `until` exp(G_C - G), which a last chunk goes on to its end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.delta import gated_norm, key_heads_of, log_decay, unit
from mosaic.runtime.ops.cuda.delta_conv import conv
from mosaic.runtime.ops.reference_delta import CHUNK
from mosaic.runtime.state import DeltaState

COLUMNS = 32  # of the state, of a program that walks


@triton.jit
def _prepare(
    mixed: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    writes: tl.tensor,
    reads: tl.tensor,
    shares: tl.tensor,
    since: tl.tensor,
    until: tl.tensor,
    tokens: int,
    key_heads: int,
    ratio: int,
    scale: float,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    number, head, heads = tl.program_id(0), tl.program_id(1), key_heads * ratio
    place, key_column, value_column = tl.arange(0, chunk), tl.arange(0, key_dim), tl.arange(0, value_dim)
    token = (number * chunk + place).to(tl.int64)
    inside = token < tokens
    rate = log_decay(tl.load(a + token * heads + head, mask=inside, other=0.0), a_log + head, dt_bias + head)
    beta = tl.where(inside, tl.sigmoid(tl.load(b + token * heads + head, mask=inside, other=0.0)), 0.0)
    rates = tl.where(inside, rate, 0.0).to(tl.float64)  # differences of sums are exponentiated
    total, whole = tl.cumsum(rates, axis=0), tl.sum(rates, axis=0)
    past = place[:, None] >= place[None, :]
    decay = tl.exp(tl.where(past, total[:, None] - total[None, :], -float("inf")).to(tl.float32))
    after = tl.exp(total.to(tl.float32))

    rows = mixed + token[:, None] * (2 * key_heads * key_dim + heads * value_dim)
    queries = rows + head // ratio * key_dim + key_column[None, :]
    query = unit(tl.load(queries, mask=inside[:, None], other=0.0)) * scale
    key = unit(tl.load(queries + key_heads * key_dim, mask=inside[:, None], other=0.0))
    block = head * tl.num_programs(0) + number
    pairs = place[:, None] * chunk + place[None, :]
    products = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
    tl.store(shares + block.to(tl.int64) * chunk * chunk + pairs, products)
    tl.store(since + block * chunk + place, after)
    tl.store(until + block * chunk + place, tl.exp((whole - total).to(tl.float32)))

    system = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * beta[:, None]
    system = tl.where(place[:, None] > place[None, :], system, 0.0)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)  # transposed: column after column is found
    for step in range(1, chunk):
        factors = tl.sum(tl.where(place[:, None] == step, system, 0.0), axis=0)
        found = tl.sum(inverse * factors[None, :], axis=1)
        inverse -= tl.where(place[None, :] == step, found[:, None], 0.0)
    inverse = tl.trans(inverse)

    first = (block.to(tl.int64) * chunk + place)[:, None]
    sides = key * (beta * after)[:, None]
    tl.store(reads + first * key_dim + key_column[None, :], tl.dot(inverse, sides, input_precision="ieee"))
    values = rows + 2 * key_heads * key_dim + head * value_dim + value_column[None, :]
    sides = tl.load(values, mask=inside[:, None], other=0.0) * beta[:, None]
    tl.store(writes + first * value_dim + value_column[None, :], tl.dot(inverse, sides, input_precision="ieee"))


@triton.jit
def _walk(
    mixed: tl.tensor,
    writes: tl.tensor,
    reads: tl.tensor,
    shares: tl.tensor,
    since: tl.tensor,
    until: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    tokens: int,
    key_heads: int,
    ratio: int,
    scale: float,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    head, column = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    heads, chunks = key_heads * ratio, tl.cdiv(tokens, chunk)
    place, key_column = tl.arange(0, chunk), tl.arange(0, key_dim)
    cells = state + (head * key_dim + key_column)[:, None] * value_dim + column[None, :]
    held = tl.load(cells)
    for number in range(chunks):
        block = (head * chunks + number).to(tl.int64)
        token, row = (number * chunk + place).to(tl.int64), block * chunk + place
        inside = (token < tokens)[:, None]
        queries = mixed + token[:, None] * (2 * key_heads * key_dim + heads * value_dim)
        queries += head // ratio * key_dim + key_column[None, :]

        predicted = tl.dot(tl.load(reads + row[:, None] * key_dim + key_column[None, :]), held, input_precision="ieee")
        written = tl.load(writes + row[:, None] * value_dim + column[None, :]) - predicted

        query = unit(tl.load(queries, mask=inside, other=0.0)) * scale
        read = tl.dot(query, held, input_precision="ieee") * tl.load(since + row)[:, None]
        pairs = row[:, None] * chunk + place[None, :]
        read += tl.dot(tl.load(shares + pairs), written, input_precision="ieee")
        tl.store(out + (token * heads + head)[:, None] * value_dim + column[None, :], read, mask=inside)

        key = unit(tl.load(queries + key_heads * key_dim, mask=inside, other=0.0)) * tl.load(until + row)[:, None]
        held = held * tl.load(since + block * chunk + chunk - 1)
        held += tl.dot(tl.trans(key), written, input_precision="ieee")
    tl.store(cells, held)


@triton.jit
def _norm(read: tl.tensor, z: tl.tensor, norm: tl.tensor, eps: float, value_dim: tl.constexpr) -> None:
    column = tl.arange(0, value_dim)
    place = tl.program_id(0).to(tl.int64) * value_dim + column
    tl.store(read + place, gated_norm(tl.load(read + place), z + place, norm + column, value_dim, eps))


def gated_delta_chunk(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
    """See `mosaic.runtime.ops.Ops.gated_delta`: [T, value heads * d_v]; d_k and d_v are powers of two, at least 16.

    Advances `state.conv` and `state.recurrent` in place, but not `state.position`, which is the host's.
    """
    key_heads = key_heads_of(inputs, weights, state)
    tokens, (heads, key_dim, value_dim) = len(inputs.qkv), state.recurrent.shape
    device, chunks = inputs.qkv.device, triton.cdiv(tokens, CHUNK)
    mixed = conv(inputs.qkv, state.conv, weights.conv)
    kinds = (value_dim,), (key_dim,), (CHUNK,), (), ()
    between = [torch.empty(heads, chunks, CHUNK, *kind, device=device) for kind in kinds]
    sizes = {"tokens": tokens, "key_heads": key_heads, "ratio": heads // key_heads, "scale": key_dim**-0.5}
    shape = {"key_dim": key_dim, "value_dim": value_dim, "chunk": CHUNK}
    _prepare[chunks, heads](
        mixed,
        inputs.b.contiguous(),
        inputs.a.contiguous(),
        weights.a_log,
        weights.dt_bias,
        *between,
        **sizes,
        **shape,
        num_warps=8,
        num_stages=1,
    )
    out, tile = torch.empty(tokens, heads * value_dim, device=device), min(COLUMNS, value_dim)
    _walk[heads, value_dim // tile](
        mixed, *between, state.recurrent, out, **sizes, **shape, tile=tile, num_warps=8, num_stages=1
    )
    _norm[tokens * heads,](out, inputs.z.contiguous(), weights.norm, weights.eps, value_dim=value_dim, num_warps=1)
    return out
