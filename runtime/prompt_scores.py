"""Log-probabilities of the tokens of a prompt, as it is read; logits are never all held."""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from mosaic.runtime.model import HybridModel
from mosaic.runtime.sampler import Chosen, scored

BLOCK_LOGITS = 1 << 23  # at a time


def scores_of(
    model: HybridModel, hidden: Tensor, following: Sequence[int], logprobs: int, num_tokens: int
) -> list[Chosen]:
    """How likely each of `following` was by final hidden states [T, H], the row before it; T or T - 1 tokens."""
    found: list[Chosen] = []
    rows = torch.arange(len(following))
    # Even blocks: a row alone would take other kernels than several do.
    for block in rows.tensor_split(ceil(len(following) * model.spec.vocab_size / BLOCK_LOGITS)) if len(rows) else ():
        logits = model.logits(hidden[block]).numpy()
        found += [scored(row, following[at], logprobs, num_tokens) for row, at in zip(logits, block.tolist(), strict=True)]
    return found
