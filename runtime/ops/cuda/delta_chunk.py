"""Gated DeltaNet for several tokens: prompts. The delta rule in its chunked form, chunks of 64 from the first token on.

What does not depend on the state is worked out for all chunks at once, a program for each and head (`_solve`). The
state then walks through the chunks, a program for each head and tile of its columns (`_walk`). With the names of
docs/MODELS.md, section 3, where keys and queries are scaled, n a factor that scales one, and A the strictly lower part:

    inverses = (I + A)^-1 diag(beta);   shares = (q k^T) D;   asking = n_q exp(G);   known = n_k exp(G)
    kept = n_k exp(G_C - G);            left = exp(G_C)

so that of the unscaled q and k V = inverses (v - known k S0), o = asking q S0 + shares V, S1 = left S0 + (kept k)^T V.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.delta import gated_norm, inverse_length, key_heads_of, log_decay
from mosaic.runtime.ops.cuda.delta_conv import conv
from mosaic.runtime.ops.reference_delta import CHUNK
from mosaic.runtime.state import DeltaState

COLUMNS = 32  # of the state, of a program that walks
WIDTH = 16  # columns of queries and keys at a time: with more, registers do not suffice


@triton.jit
def _solve(
    mixed: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    inverses: tl.tensor,
    shares: tl.tensor,
    asking: tl.tensor,
    known: tl.tensor,
    kept: tl.tensor,
    left: tl.tensor,
    tokens: int,
    key_heads: int,
    ratio: int,
    scale: float,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
) -> None:
    number, head, heads = tl.program_id(0), tl.program_id(1), key_heads * ratio
    place, column = tl.arange(0, chunk), tl.arange(0, width)
    token = (number * chunk + place).to(tl.int64)
    inside = token < tokens
    block = head * tl.num_programs(0) + number
    row, earlier = place[:, None], place[None, :]

    products, system = tl.zeros((chunk, chunk), tl.float32), tl.zeros((chunk, chunk), tl.float32)
    lengths, key_lengths = tl.zeros((chunk,), tl.float32), tl.zeros((chunk,), tl.float32)
    queries = mixed + token[:, None] * (2 * key_heads * key_dim + heads * value_dim) + head // ratio * key_dim
    for first in range(0, key_dim, width):
        query = tl.load(queries + first + column[None, :], mask=inside[:, None], other=0.0)
        key = tl.load(queries + key_heads * key_dim + first + column[None, :], mask=inside[:, None], other=0.0)
        products = tl.dot(query, tl.trans(key), products, input_precision="ieee")
        system = tl.dot(key, tl.trans(key), system, input_precision="ieee")
        lengths += tl.sum(query * query, axis=1)
        key_lengths += tl.sum(key * key, axis=1)
    asked = inverse_length(lengths) * scale
    unit = inverse_length(key_lengths)

    rate = log_decay(tl.load(a + token * heads + head, mask=inside, other=0.0), a_log + head, dt_bias + head)
    rate = tl.where(inside, rate, 0.0).to(tl.float64)  # differences of sums are exponentiated
    total, whole = tl.cumsum(rate, axis=0), tl.sum(rate, axis=0)
    since = tl.exp(total.to(tl.float32))
    rows = block * chunk + place
    tl.store(asking + rows, asked * since)
    tl.store(known + rows, unit * since)
    tl.store(kept + rows, unit * tl.exp((whole - total).to(tl.float32)))
    tl.store(left + block, tl.exp(whole.to(tl.float32)))

    decay = tl.exp(tl.where(row >= earlier, total[:, None] - total[None, :], -float("inf")).to(tl.float32))
    pairs = block.to(tl.int64) * chunk * chunk + row * chunk + earlier
    tl.store(shares + pairs, products * decay * asked[:, None] * unit[None, :])
    beta = tl.where(inside, tl.sigmoid(tl.load(b + token * heads + head, mask=inside, other=0.0)), 0.0)
    system = tl.where(row > earlier, system * decay * (beta * unit)[:, None] * unit[None, :], 0.0)
    inverse = tl.where(row == earlier, 1.0, 0.0)  # transposed: found column after column
    for step in range(1, chunk):
        factors = tl.sum(tl.where(row == step, system, 0.0), axis=0)
        found = tl.sum(inverse * factors[None, :], axis=1)
        inverse -= tl.where(earlier == step, found[:, None], 0.0)
    pairs = block.to(tl.int64) * chunk * chunk + earlier * chunk + row
    tl.store(inverses + pairs, inverse * beta[:, None])


@triton.jit
def _walk(
    mixed: tl.tensor,
    inverses: tl.tensor,
    shares: tl.tensor,
    asking: tl.tensor,
    known: tl.tensor,
    kept: tl.tensor,
    left: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    tokens: int,
    key_heads: int,
    ratio: int,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    head, column = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    heads, chunks = key_heads * ratio, tl.cdiv(tokens, chunk)
    channels = 2 * key_heads * key_dim + heads * value_dim
    place, part = tl.arange(0, chunk), tl.arange(0, width)
    cells = state + (head * key_dim + part)[:, None] * value_dim + column[None, :]
    for number in range(chunks):
        token, row = (number * chunk + place).to(tl.int64), (head * chunks + number) * chunk + place
        inside, pairs = (token < tokens)[:, None], row.to(tl.int64)[:, None] * chunk + place[None, :]
        queries = mixed + token[:, None] * channels + head // ratio * key_dim + part[None, :]
        keys = queries + key_heads * key_dim
        predicted, read = tl.zeros((chunk, tile), tl.float32), tl.zeros((chunk, tile), tl.float32)
        for first in range(0, key_dim, width):
            held = tl.load(cells + first * value_dim)
            key = tl.load(keys + first, mask=inside, other=0.0)
            predicted = tl.dot(key, held, predicted, input_precision="ieee")
            query = tl.load(queries + first, mask=inside, other=0.0)
            read = tl.dot(query, held, read, input_precision="ieee")
        values = mixed + token[:, None] * channels + 2 * key_heads * key_dim + head * value_dim + column[None, :]
        errors = tl.load(values, mask=inside, other=0.0) - predicted * tl.load(known + row)[:, None]
        written = tl.dot(tl.load(inverses + pairs), errors, input_precision="ieee")
        read *= tl.load(asking + row)[:, None]
        read += tl.dot(tl.load(shares + pairs), written, input_precision="ieee")
        tl.store(out + (token * heads + head)[:, None] * value_dim + column[None, :], read, mask=inside)
        written *= tl.load(kept + row)[:, None]
        decay = tl.load(left + head * chunks + number)
        tl.debug_barrier()  # the state has been read
        for first in range(0, key_dim, width):
            key = tl.load(keys + first, mask=inside, other=0.0)
            held = tl.load(cells + first * value_dim) * decay
            tl.store(cells + first * value_dim, held + tl.dot(tl.trans(key), written, input_precision="ieee"))
        tl.debug_barrier()  # it has been written


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
    shapes = [(CHUNK, CHUNK)] * 2 + [(CHUNK,)] * 3 + [()]
    between = [torch.empty(heads, chunks, *shape, device=device) for shape in shapes]
    sizes = {"tokens": tokens, "key_heads": key_heads, "ratio": heads // key_heads}
    shape = {"key_dim": key_dim, "value_dim": value_dim, "chunk": CHUNK, "width": WIDTH}
    gates = inputs.b.contiguous(), inputs.a.contiguous(), weights.a_log, weights.dt_bias
    scale = key_dim**-0.5
    _solve[chunks, heads](mixed, *gates, *between, **sizes, **shape, scale=scale, num_warps=8, num_stages=1)
    out, tile = torch.empty(tokens, heads * value_dim, device=device), min(COLUMNS, value_dim)
    _walk[heads, value_dim // tile](
        mixed, *between, state.recurrent, out, **sizes, **shape, tile=tile, num_warps=8, num_stages=1
    )
    _norm[tokens * heads,](out, inputs.z.contiguous(), weights.norm, weights.eps, value_dim=value_dim, num_warps=1)
    return out
