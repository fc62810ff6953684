"""Where a part of a model is computed: on the host, or on a device with memory of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from mosaic.runtime.experts.store import LayerExperts
from mosaic.runtime.kv import KVPool
from mosaic.runtime.ops import Ops, Routing
from mosaic.runtime.state import LayerState, new_layer_state
from mosaic.runtime.weights import ModelWeights

Segment = Callable[[Tensor, Tensor | None, Sequence[LayerState]], tuple[Tensor, ...]]
Run = Callable[[Segment, Tensor, Tensor | None, Sequence[LayerState]], tuple[Tensor, ...]]


class Mixing(Protocol):
    """Computes the experts of a layer, each where it lies (`mosaic.runtime.experts.tier`)."""

    def __call__(self, x: Tensor, routing: Routing, shared: Tensor | None, source: LayerExperts) -> Tensor:
        """See Ops.experts. `shared` [.., H]: what the shared expert made of x, which then is not asked for."""


def plainly(segment: Segment, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> tuple[Tensor, ...]:
    """Runs what is between two layers' experts as it is written; see `Home.run`."""
    return segment(x, addend, states)


@dataclass(frozen=True, eq=False)
class Home:
    """`new_state`: what a layer, by its number, remembers of an empty sequence, in memory of this home.

    `bring`: activations from elsewhere. `mixing`: who computes routed experts, if not the operations alone. `run`: runs
    a segment; a device may have recorded it. `enter`: this thread is going to compute here.
    """

    ops: Ops
    weights: ModelWeights
    pool: KVPool
    new_state: Callable[[int], LayerState]
    bring: Callable[[Tensor], Tensor]
    mixing: Mixing | None = None
    run: Run = plainly
    enter: Callable[[], None] = lambda: None


def host(ops: Ops, weights: ModelWeights, pool: KVPool, mixing: Mixing | None = None) -> Home:
    """The home in the memory of this process. Other homes bring their tensors here by themselves."""
    return Home(ops, weights, pool, partial(new_layer_state, weights.spec, pool=pool), Tensor.cpu, mixing)
