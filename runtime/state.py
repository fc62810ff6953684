"""What a sequence remembers: keys and values per attention layer, a state of fixed size per linear-attention layer.

A sequence only goes forward, since a recurrent state cannot be taken back. To return to an earlier moment, resume a
snapshot that was made then.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mosaic.format.spec import GatedDeltaSpec, Mixer, ModelSpec
from mosaic.runtime.kv import KVCache, KVPool


class DeltaState:
    """State of one linear-attention layer: convolution history [taps - 1, C], recurrent [value heads, d_k, d_v]."""

    def __init__(self, spec: GatedDeltaSpec) -> None:
        self.position = 0
        self.conv, self.recurrent = map(torch.zeros, self.shapes(spec))

    @staticmethod
    def shapes(spec: GatedDeltaSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the convolution history and the recurrent state."""
        conv = spec.conv_kernel - 1, spec.conv_dim
        return conv, (spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.conv.nbytes + self.recurrent.nbytes

    def reserve(self, tokens: int) -> None:
        """So many more tokens are to advance it next."""
        self.position += tokens

    def fork(self, length: int) -> "DeltaState":
        """A copy. `length` can only be its own position."""
        assert length == self.position
        twin = copy.copy(self)
        twin.conv, twin.recurrent = self.conv.clone(), self.recurrent.clone()
        return twin


LayerState = KVCache | DeltaState


def new_layer_state(spec: ModelSpec, number: int, pool: KVPool) -> LayerState:
    """What layer `number` remembers of an empty sequence."""
    if spec.layers[number].mixer is Mixer.FULL_ATTENTION:
        return pool.cache()
    assert spec.gated_delta is not None
    return DeltaState(spec.gated_delta)


class SequenceState:
    """Everything one sequence remembers. `layers` holds a KVCache or DeltaState per decoder layer."""

    def __init__(self, layers: Sequence[LayerState], length: int = 0) -> None:
        self.layers = layers
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes of its recurrent states: what a snapshot copies."""
        return recurrent_nbytes(self.layers)

    def snapshot(self) -> "Snapshot":
        """The state as it is now, whatever becomes of the sequence."""
        return Snapshot(tuple(layer.fork(self.length) for layer in self.layers), self.length)


@dataclass(frozen=True)
class Snapshot:
    """A sequence at one moment: layer states of its own, which nobody advances."""

    layers: tuple[LayerState, ...]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of its recurrent states. Its pages are shared, but for at most one in each layer."""
        return recurrent_nbytes(self.layers)

    @property
    def cuttable(self) -> bool:
        """Whether it can be resumed at any earlier token, too: no state in it is recurrent."""
        return all(isinstance(layer, KVCache) for layer in self.layers)

    def resume(self, length: int | None = None) -> SequenceState:
        """A new sequence that goes on from here, or, `cuttable`, from its first `length` tokens."""
        length = self.length if length is None else length
        return SequenceState([layer.fork(length) for layer in self.layers], length)


def recurrent_nbytes(layers: Sequence[LayerState]) -> int:
    """Bytes of the recurrent states among them."""
    return sum(layer.nbytes for layer in layers if isinstance(layer, DeltaState))
