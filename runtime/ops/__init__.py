"""The seam between the model and arithmetic: one table of operations, several implementations.

`reference` (torch, slow) is the specification, `cpu` the fast one. Shapes: T tokens, H hidden, N x K a matrix, E
experts, C convolution channels, h heads, d dims of a head. An implementation chooses the float type of activations and
recurrent states.

Activations [.., K] are [T, K] of one sequence or [B, T, K] of B; a step of decoding is [B, 1, K]. Each sequence gets
what it would get alone (from `cpu`, to the bit), and weights are read once for all.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mosaic.runtime.kv import KVCache
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import Expert, Weight


@dataclass(frozen=True)
class Routing:
    """Which experts each token uses: `experts` int64 [.., R], `weights` [.., R]; best first, a shared one last."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """What a Gated DeltaNet projects of T tokens; C = 2 key heads * d_k + value heads * d_v.

    qkv [T, C]: query, key and value side by side; z [T, value heads * d_v]; b, a [T, value heads].
    """

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True)
class DeltaWeights:
    """The small weights of a Gated DeltaNet, and its norm's eps.

    conv [C, taps], the last tap for the token itself; a_log, dt_bias [value heads]; norm [d_v].
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class ExpertSource(Protocol):
    """The experts of one layer, from wherever their bytes are."""

    def observe(self, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """The router chose these [.., R]; `arriving` follows, but for those that have been found elsewhere."""

    def arriving(self, numbers: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """Each of these experts once, in groups, as they become available, for so many tokens of a sequence.

        A group is there until the next one is asked for. To be run to its end or closed.
        """

    def nbytes(self, numbers: Collection[int]) -> int:
        """Bytes that using these experts once reads."""


class Ops(Protocol):
    """Every operation a model is made of. Of its arguments an operation may change states, which it also returns."""

    def embed(self, rows: Tensor) -> Tensor:
        """Rows [T, H] of the embedding table as activations."""

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """X [.., K] times weight [N, K] transposed: [.., N]."""

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """The same for several weights."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """X / rms(x) * (offset + weight) over the last axis."""

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """(x + y, its rms_norm)."""

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """Rotary embedding of the first `rotary_dim` dims of x [T, h, d], halves paired; positions [T]."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache) -> Tensor:
        """Causal attention of T tokens, for which the cache has room reserved: query [T, h, d]; [T, h, d].

        Stores key and value [T, kv heads, d], and attends to what is stored.
        """

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """X * sigmoid(gate), broadcast."""

    def gated_delta(self, inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
        """Gated DeltaNet between its projections: [T, value heads * d_v]; changes the state, which counted T tokens.

        A convolution, the gated delta rule token after token, and an RMSNorm gated by z.
        """

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """The top_k experts of each token by logits [.., E]; of equal ones the lower expert number wins.

        With `shared` [.., 1] every token uses one more, number E, with the weight sigmoid(shared).
        """

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """down(silu(gate(x)) * up(x)): [.., H]."""

    def experts(self, x: Tensor, routing: Routing, source: ExpertSource) -> Tensor:
        """Weighted sum of the routed experts' outputs [.., H].

        Added in routing order, whatever else is in the batch and in whatever order experts arrive.
        """
