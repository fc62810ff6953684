"""What follows the mixer: a dense SwiGLU, or a router over experts with a gated shared expert among them."""

from torch import Tensor

from mosaic.runtime.experts.store import ExpertStore, LayerExperts
from mosaic.runtime.home import Home
from mosaic.runtime.ops import Ops, Routing
from mosaic.runtime.weights import Expert, ModelWeights


class Dense:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, ops: Ops, weights: ModelWeights, key: str) -> None:
        self._ops = ops
        self._matrices = Expert(*(weights.matrix(f"{key}.{name}") for name in ("gate", "up", "down")))

    @property
    def nbytes(self) -> int:
        """Weight bytes read per use."""
        return self._matrices.nbytes

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """X [.., H]: all of it, [.., H]."""
        return (self._ops.swiglu(x, self._matrices.gate, self._matrices.up, self._matrices.down),)

    def finish(self, result: Tensor) -> Tensor:
        """What was begun with: [.., H]."""
        return result


class MixtureOfExperts:
    """Routed experts, and a shared one that every token uses: the sum of their outputs by the weights of the router."""

    def __init__(self, home: Home, experts: ExpertStore, layer: int, key: str) -> None:
        weights, spec = home.weights, home.weights.spec.moe
        self._ops = home.ops
        self._mixing = home.mixing
        self._spec = spec
        self._layer = layer
        self._store = experts
        self._router = [weights.matrix(f"{key}.router")]
        self._shared: Expert | None = None
        if spec.shared_intermediate_size:
            self._router.append(weights.matrix(f"{key}.shared_gate"))
            self._shared = Expert(*(weights.matrix(f"{key}.shared.{name}") for name in ("gate", "up", "down")))
        self._experts = LayerExperts(experts, layer, spec.num_experts, self._shared)

    @property
    def nbytes(self) -> int:
        """Weight bytes read for one token."""
        used = [*range(self._spec.top_k), *([self._spec.num_experts] if len(self._router) > 1 else [])]
        return sum(weight.nbytes for weight in self._router) + self._experts.nbytes(used)

    def foretell(self, x: Tensor) -> None:
        """Tell the store what the router would choose for a token of each sequence, x [.., 1, H].

        It is not yet what the router will be given.
        """
        top_k = self._spec.top_k
        routing = self._ops.route(self._ops.linears(x, self._router[:1])[0], top_k, self._spec.normalize_top_k, None)
        best_first = routing.experts.view(-1, top_k).T.flatten()
        self._store.expect(self._layer, list(dict.fromkeys(best_first.tolist())))

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """X [.., H]: itself, the routing, and what the shared expert makes of it if others compute the routed ones."""
        logits, *gate = self._ops.linears(x, self._router)
        shared = gate[0] if gate else None
        routing = self._ops.route(logits, self._spec.top_k, self._spec.normalize_top_k, shared)
        begun = x, routing.experts, routing.weights
        if self._mixing and self._shared:
            return *begun, self._ops.swiglu(x, self._shared.gate, self._shared.up, self._shared.down)
        return begun

    def finish(self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """What was begun with: [.., H]."""
        routing = Routing(experts, weights)
        if self._mixing:
            return self._mixing(x, routing, shared, self._experts)
        return self._ops.experts(x, routing, self._experts)
