"""What follows the mixer: a dense SwiGLU, or a router over experts with a gated shared expert beside them."""

from torch import Tensor

from mosaic.format.spec import ModelSpec
from mosaic.runtime.experts.store import MappedExperts
from mosaic.runtime.layers.linear import Linear
from mosaic.runtime.ops import Ops
from mosaic.runtime.weights import Expert, Weights


class Dense:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, ops: Ops, weights: Weights, key: str) -> None:
        self._ops = ops
        self._matrices = Expert(*(weights.matrix(f"{key}.{name}") for name in ("gate", "up", "down")))

    @property
    def nbytes(self) -> int:
        """Weight bytes read per use."""
        return self._matrices.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, H] -> [T, H]."""
        return self._ops.swiglu(x, self._matrices.gate, self._matrices.up, self._matrices.down)


class MixtureOfExperts:
    """Router, routed experts, shared expert: y = sum of the routed + sigmoid(gate(x)) * shared(x)."""

    def __init__(
        self, ops: Ops, spec: ModelSpec, weights: Weights, experts: MappedExperts, layer: int, key: str
    ) -> None:
        self._ops = ops
        self._spec = spec.moe
        self._layer = layer
        self._experts = experts
        self._router = weights.matrix(f"{key}.router")
        self._shared = self._shared_gate = None
        if spec.moe.shared_intermediate_size:
            self._shared = Dense(ops, weights, f"{key}.shared")
            self._shared_gate = Linear(ops, weights.matrix(f"{key}.shared_gate"))

    @property
    def nbytes(self) -> int:
        """Weight bytes read for one token."""
        shared = sum(part.nbytes for part in (self._shared, self._shared_gate) if part)
        return self._router.nbytes + shared + self._spec.top_k * self._expert(0).nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, H] -> [T, H]."""
        routing = self._ops.route(x, self._router, self._spec.top_k, self._spec.normalize_top_k)
        result = self._ops.experts(x, routing, self._expert)
        if self._shared and self._shared_gate:
            result = result + self._ops.sigmoid_gate(self._shared(x), self._shared_gate(x))
        return result

    def _expert(self, number: int) -> Expert:
        return self._experts.expert(self._layer, number)
