"""What follows the mixer: a dense SwiGLU, or a router over experts with a gated shared expert among them."""

from torch import Tensor

from mosaic.format.spec import ModelSpec
from mosaic.runtime.ops import Ops
from mosaic.runtime.weights import Expert, ExpertStore, ModelWeights


class Dense:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, ops: Ops, weights: ModelWeights, key: str) -> None:
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
    """Routed experts, and a shared one that every token uses: the sum of their outputs by the weights of the router."""

    def __init__(
        self, ops: Ops, spec: ModelSpec, weights: ModelWeights, experts: ExpertStore, layer: int, key: str
    ) -> None:
        self._ops = ops
        self._spec = spec.moe
        self._layer = layer
        self._experts = experts
        self._router = [weights.matrix(f"{key}.router")]
        self._shared: Expert | None = None
        if spec.moe.shared_intermediate_size:
            self._router.append(weights.matrix(f"{key}.shared_gate"))
            self._shared = Expert(*(weights.matrix(f"{key}.shared.{name}") for name in ("gate", "up", "down")))

    @property
    def nbytes(self) -> int:
        """Weight bytes read for one token."""
        shared = self._shared.nbytes if self._shared else 0
        router = sum(weight.nbytes for weight in self._router)
        return router + shared + self._spec.top_k * self._expert(0).nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """X [T, H] -> [T, H]."""
        logits, *gate = self._ops.linears(x, self._router)
        shared = gate[0] if gate else None
        routing = self._ops.route(logits, self._spec.top_k, self._spec.normalize_top_k, shared)
        return self._ops.experts(x, routing, self._expert)

    def _expert(self, number: int) -> Expert:
        if self._shared and number == self._spec.num_experts:
            return self._shared
        return self._experts.expert(self._layer, number)
