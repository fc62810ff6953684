"""A model run layer by layer over many sequences at once, so that each layer's weights are read once.

The other way round, sequence by sequence, a model larger than the memory would be read as often as there are
sequences. For judging texts: nothing here generates. The numbers are those of the engine's prefill, bit for bit.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from mosaic.format.errors import InputError
from mosaic.runtime.machine import free_memory
from mosaic.runtime.model import HybridModel
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.weights import ModelWeights

HELD_SHARE = 4  # states above one part in so many of the free memory go into a file


@torch.inference_mode()
def final_hidden(
    model: HybridModel, weights: ModelWeights, windows: Sequence[Sequence[int]], layer_done: Callable[[], object]
) -> Tensor:
    """Final hidden states [T, H] of the T tokens of all windows, each a sequence of its own, one after the other."""
    bounds = list(accumulate(map(len, windows), initial=0))
    first = model.embed(windows[0][:1])
    states = room((bounds[-1], first.shape[-1]), first.dtype)
    places = list(pairwise(bounds))
    for window, (start, end) in zip(windows, places, strict=True):
        states[start:end] = model.embed(window)
    for number in range(len(model.spec.layers)):
        weights.read_ahead(_prefix(number))
        for start, end in places:
            _advance(model, number, states[start:end])
        weights.release(_prefix(number))
        layer_done()
    return states


def _advance(model: HybridModel, number: int, states: Tensor) -> None:
    """One layer over one window [T, H], in place."""
    state = model.new_layer_state(number)
    for chunk in torch.split(states, PREFILL_CHUNK):
        chunk.copy_(model.advance(number, chunk, state))


def _prefix(number: int) -> str:
    return f"layers.{number}."


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for states: the process's own, or if they are large pages of a file that goes with them.

    The file is in TMPDIR (/tmp); InputError if its disk has no room.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes <= free_memory() // HELD_SHARE:
        return torch.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is told now, and not by a signal later
        except OSError as error:
            raise InputError(
                "no room for the states of the text",
                file=tempfile.gettempdir(),
                found=error.strerror,
                expected=f"{nbytes:,} bytes",
                remedy="use less of the text (--tokens), or set TMPDIR to a folder on a larger disk",
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=dtype).view(shape)
