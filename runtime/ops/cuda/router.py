"""Which experts a token uses, and with what weights: a program for each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mosaic.runtime.ops import Routing


@triton.jit
def _route(
    logits: tl.tensor,
    shared: tl.tensor,
    numbers: tl.tensor,
    weights: tl.tensor,
    experts: int,
    top_k: tl.constexpr,
    ranks: tl.constexpr,
    normalize: tl.constexpr,
    width: tl.constexpr,
) -> None:
    token, expert, rank = tl.program_id(0).to(tl.int64), tl.arange(0, width), tl.arange(0, ranks)
    score = tl.load(logits + token * experts + expert, mask=expert < experts, other=-float("inf"))
    highest = tl.max(score, axis=0)
    share = tl.exp(score - highest)
    whole = tl.sum(share, axis=0)
    free = expert < experts
    chosen, shares = tl.zeros((ranks,), tl.int32), tl.zeros((ranks,), tl.float32)
    for place in range(top_k):
        best = tl.max(tl.where(free, score, -float("inf")), axis=0)
        number = tl.min(tl.where(free & (score == best), expert, width), axis=0)
        chosen = tl.where(rank == place, number, chosen)
        shares = tl.where(rank == place, tl.exp(best - highest), shares)
        free = free & (expert != number)
    if normalize:
        whole = tl.sum(shares, axis=0)
    shares = shares / whole
    used = top_k
    if shared is not None:
        chosen = tl.where(rank == top_k, experts, chosen)
        shares = tl.where(rank == top_k, tl.sigmoid(tl.load(shared + token)), shares)
        used = top_k + 1
    tl.store(numbers + token * used + rank, chosen.to(tl.int64), mask=rank < used)
    tl.store(weights + token * used + rank, shares, mask=rank < used)


def route(logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
    """See `mosaic.runtime.ops.Ops.route`: logits [T, E] and shared [T, 1], float32, finite."""
    tokens, experts = logits.shape
    used = top_k if shared is None else top_k + 1
    assert 1 <= top_k <= experts, (top_k, experts)
    assert shared is None or shared.shape == (tokens, 1), shared.shape
    numbers = torch.empty(tokens, used, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, used, device=logits.device)
    _route[tokens,](
        logits.contiguous(),
        None if shared is None else shared.contiguous(),
        numbers,
        weights,
        experts,
        top_k=top_k,
        ranks=triton.next_power_of_2(used),
        normalize=normalize,
        width=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return Routing(numbers, weights)
