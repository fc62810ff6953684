"""A model that costs no time: each token follows from everything that a real SequenceState holds."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from mosaic.runtime.kv import KVCache, KVFormat, KVPool, pages_of
from mosaic.runtime.state import SequenceState, new_layer_state
from support.states import append

WIDTH = 512  # of a key: few pages in a slab, since making them takes time


class Rememberer:
    """Stands for HybridModel. What it answers tells whether a state is exactly that of the tokens before."""

    nbytes_per_token = 1

    def __init__(self, spec) -> None:
        self.spec = spec
        self.calls: list[int] = []  # tokens of each call of `hidden`; 0 for a step
        self.pool = KVPool(1, WIDTH, KVFormat.F32)

    @property
    def pages_in_use(self) -> int:
        return self.pool.pages_in_use

    def pages(self, tokens: int) -> int:
        return pages_of(tokens) * sum(isinstance(layer, KVCache) for layer in self.new_sequence().layers)

    def new_sequence(self) -> SequenceState:
        return SequenceState([new_layer_state(self.spec, number, self.pool) for number in range(len(self.spec.layers))])

    def hidden(self, ids: Sequence[int], state: SequenceState) -> torch.Tensor:
        self.calls.append(len(ids))
        return torch.stack([self._after(token, state) for token in ids])

    def step(self, ids: Sequence[int], states: Sequence[SequenceState]) -> torch.Tensor:
        self.calls.append(0)
        return torch.stack([self._after(token, state) for token, state in zip(ids, states, strict=True)])

    def _after(self, token: int, state: SequenceState) -> torch.Tensor:
        held: list[object] = []
        for layer in state.layers:
            if isinstance(layer, KVCache):
                row = torch.full((1, 1, WIDTH), float(token))
                append(layer, row, row)
                stored = [value for page in layer.pages for value in page.values[0, :, 0, 0].tolist()]
                held.append(stored[: layer.length])
            else:
                digest = zlib.crc32(repr((layer.recurrent.flatten()[0].item(), layer.position, token)).encode())
                layer.recurrent = torch.tensor([digest], dtype=torch.float64)
                layer.position += 1
                held.append(digest)
        state.length += 1
        return torch.tensor([zlib.crc32(repr((held, state.length)).encode())], dtype=torch.float64)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [self._row(int(row.item())) for row in hidden.flatten()]
        return torch.stack(rows).view(*hidden.shape[:-1], self.spec.vocab_size)

    def candidates(self, hidden: torch.Tensor, needed: Sequence[int], num_tokens: int) -> list[np.ndarray]:
        return list(self.logits(hidden).numpy())

    def _row(self, seed: int) -> torch.Tensor:
        return torch.rand(self.spec.vocab_size, generator=torch.Generator().manual_seed(seed))
