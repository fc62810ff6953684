"""Log-probabilities of the tokens of a prompt, as it is read; logits are never all held."""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from mosaic.runtime.model import HybridModel
from mosaic.runtime.sampler import Chosen, scored

BLOCK_LOGITS = 1 << 22  # at a time


def scores_of(
    model: HybridModel, hidden: Tensor, following: Sequence[int], logprobs: int, num_tokens: int
) -> list[Chosen]:
    """How likely each of `following` was by final hidden states [T, H], the row before it; T or T - 1 tokens."""
    found: list[Chosen] = []
    # Even blocks, and the last row with them: a row alone would take other kernels than several do.
    for rows in torch.arange(hidden.shape[0]).tensor_split(
        ceil(hidden.shape[0] * model.spec.vocab_size / BLOCK_LOGITS)
    ):
        for row, logits in zip(rows.tolist(), model.logits(hidden[rows]).numpy(), strict=True):
            if row < len(following):
                found.append(scored(logits, following[row], logprobs, num_tokens))
    return found
