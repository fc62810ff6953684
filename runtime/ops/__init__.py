"""The seam between the model and arithmetic: one table of operations, several implementations.

`reference` (torch, slow) is the specification, `cpu` the fast one. Shapes: T tokens, H hidden, N x K a matrix, E
experts, C convolution channels, h heads, d dims of a head. An implementation chooses the float type of activations and
recurrent states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mosaic.runtime.state import KVCache
from mosaic.runtime.weights import Expert, Weight


@dataclass(frozen=True)
class Routing:
    """Which experts each token uses: `experts` int64 [T, R], `weights` [T, R]; best first, a shared one last."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """Inputs of the gated delta rule, one row per token.

    query, key [T, key heads, d_k] as the convolution gives them; value [T, value heads, d_v]; `log_decay` (<= 0) and
    `beta` (0..1) [T, value heads].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def __getitem__(self, tokens: slice) -> "DeltaInputs":
        """The rows of some tokens."""
        return DeltaInputs(*(part[tokens] for part in (self.query, self.key, self.value, self.log_decay, self.beta)))


class Ops(Protocol):
    """Every operation a model is made of. Of its arguments an operation may change states, which it also returns."""

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows [T, H] of the embedding table."""

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """X [T, K] times weight [N, K] transposed: [T, N]."""

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> list[Tensor]:
        """The same for several weights."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """X / rms(x) * (offset + weight) over the last axis."""

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """(x + y, its rms_norm)."""

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """X / rms(x) * weight * silu(gate) over the last axis."""

    def rotate(self, x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """Rotary embedding of the first `rotary_dim` dims of x [T, h, d], halves paired; positions [T]."""

    def attention(self, query: Tensor, cache: KVCache) -> Tensor:
        """Causal attention of the last T of the tokens in the cache: query [T, h, d]; [T, h, d]."""

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """X * sigmoid(gate), broadcast."""

    def causal_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Silu of a depthwise causal convolution: x [T, C], history [taps - 1, C], weight [C, 1, taps].

        Returns the output [T, C] and the new history.
        """

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """(log_decay, beta) [T, value heads] of projections a and b."""

    def delta_step(self, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Gated delta rule for one token, state [value heads, d_k, d_v]: output [1, value heads, d_v], new state."""

    def delta_chunk(self, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same for several tokens at once; equal to stepping through them up to rounding."""

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """The top_k experts of each token by logits [T, E]; of equal ones the lower expert number wins.

        With `shared` [T, 1] every token uses one more, number E, with the weight sigmoid(shared).
        """

    def swiglu(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        """down(silu(gate(x)) * up(x)): [T, H]."""

    def experts(self, x: Tensor, routing: Routing, expert: Callable[[int], Expert]) -> Tensor:
        """Weighted sum of the routed experts' outputs [T, H], added in routing order whatever else is in the batch."""
