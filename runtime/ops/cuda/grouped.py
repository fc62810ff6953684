"""The resident experts of many tokens: prompts. Tokens are grouped by expert, so an expert is read once for 32 of them.

Outputs stay apart for each expert of a token, as in `experts`; `add_outputs` is the same.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.ops.cuda.decode import silu
from mosaic.runtime.ops.cuda.experts import check_places
from mosaic.runtime.ops.cuda.matmul import dot_tile
from mosaic.runtime.ops.cuda.split import split

PAIRS = 32  # of a tile: a prompt's chunk of 512 tokens gives an expert 16 of them on average
COLUMNS = 64  # of a program


@dataclass(frozen=True)
class Tiles:
    """Pairs of a token and a rank, sorted by slot and cut into tiles of one slot each.

    `order` int32 [P]: the pairs, token * R + rank. `slots`, `first` and `last` int32 [most]: a tile is
    order[first:last] for one slot. There are as many tiles as there can be at most; the rest have slot -1.
    """

    order: Tensor
    slots: Tensor
    first: Tensor
    last: Tensor


def tiles_of(slots: Tensor, num_slots: int) -> Tiles:
    """Tiles for slots [T, R] (int32, -1 for none); by the device alone, their number follows from the shape."""
    flat = slots.flatten()
    ordered, order = flat.sort(stable=True)
    numbers = torch.arange(num_slots + 1, dtype=torch.int32, device=slots.device)
    edges = torch.searchsorted(ordered, numbers)  # where each slot begins; after the last, the end
    tiles = (edges.diff() + PAIRS - 1) // PAIRS
    ends = tiles.cumsum(0)
    most = triton.cdiv(len(flat), PAIRS) + min(num_slots, len(flat))
    tile = torch.arange(most, device=slots.device)
    slot = torch.searchsorted(ends, tile, right=True)
    held = slot.clamp(max=num_slots - 1)
    first = edges[held] + (tile - (ends - tiles)[held]) * PAIRS
    last = torch.minimum(first + PAIRS, edges[held + 1])
    slot = torch.where(slot < num_slots, slot, -1)
    return Tiles(order.int(), slot.int(), first.int(), last.int())


@triton.jit
def _gate_up(
    high: tl.tensor,
    low: tl.tensor,
    factors: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    ranks: int,
    hidden: int,
    inner: int,
    blocks: int,
    height: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    number, first = tl.program_id(1), tl.program_id(0) * tile
    slot = tl.load(slots + number).to(tl.int64)
    if slot >= 0:
        place = tl.load(firsts + number) + tl.arange(0, height)
        wanted = place < tl.load(lasts + number)
        pair = tl.load(order + place, mask=wanted, other=0)
        gates, block_scales = codes + slot * inner * hidden * 3, scales + slot * blocks * 3
        ups = gates + inner * hidden
        token = pair // ranks
        gate = dot_tile(high, low, factors, token, wanted, gates, block_scales, first, inner, hidden, height, tile)
        up = dot_tile(high, low, factors, token, wanted, ups, block_scales + blocks, first, inner, hidden, height, tile)
        row = first + tl.arange(0, tile)
        target = out + pair.to(tl.int64)[:, None] * inner + row[None, :]
        tl.store(target, silu(gate) * up, mask=wanted[:, None] & (row < inner)[None, :])


@triton.jit
def _down(
    high: tl.tensor,
    low: tl.tensor,
    factors: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    hidden: int,
    inner: int,
    blocks: int,
    height: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    number, first = tl.program_id(1), tl.program_id(0) * tile
    slot = tl.load(slots + number).to(tl.int64)
    if slot >= 0:
        place = tl.load(firsts + number) + tl.arange(0, height)
        wanted = place < tl.load(lasts + number)
        pair = tl.load(order + place, mask=wanted, other=0)
        downs, block_scales = codes + (slot * 3 + 2) * inner * hidden, scales + (slot * 3 + 2) * blocks
        sums = dot_tile(high, low, factors, pair, wanted, downs, block_scales, first, hidden, inner, height, tile)
        row = first + tl.arange(0, tile)
        target = out + pair.to(tl.int64)[:, None] * hidden + row[None, :]
        tl.store(target, sums, mask=wanted[:, None] & (row < hidden)[None, :])


def apply_experts_grouped(x: Tensor, slots: Tensor, experts: ExpertSlots, outputs: Tensor) -> None:
    """As `experts.apply_experts`, for many tokens."""
    check_places(x, slots, experts, outputs)
    ranks, hidden, inner = slots.shape[1], experts.hidden, experts.inner
    tiles = tiles_of(slots, len(experts.codes))
    plan = tiles.order, tiles.slots, tiles.first, tiles.last
    between = torch.zeros(slots.numel(), inner, device=x.device)  # rows of absent experts are split, too
    sizes = {"hidden": hidden, "inner": inner, "blocks": experts.blocks, "height": PAIRS, "tile": COLUMNS}
    options = {"num_warps": 4, "num_stages": 2}
    memory, count = (experts.codes, experts.scales), len(tiles.slots)
    pieces = split(x)
    given = pieces.high, pieces.low, pieces.factors
    _gate_up[triton.cdiv(inner, COLUMNS), count](*given, *plan, *memory, between, ranks=ranks, **sizes, **options)
    pieces = split(between)
    given = pieces.high, pieces.low, pieces.factors
    _down[triton.cdiv(hidden, COLUMNS), count](*given, *plan, *memory, outputs, **sizes, **options)
