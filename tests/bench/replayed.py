"""A router that chooses what a trace says: routing as real text has it, for models whose weights are random."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosaic.runtime.experts.trace import Trace
from mosaic.runtime.ops import Ops, Routing


class ReplayedOps:
    """Other operations, but for the experts that `route` chooses: those of the trace's next tokens, layer after layer.

    Each call is of the layer that follows the call before; the trace begins anew when it ends. Not for models with
    layers that have no experts.
    """

    def __init__(self, ops: Ops, trace: Trace) -> None:
        self._ops = ops
        self._experts = trace.experts.astype(np.int64)  # [tokens, layers, top_k]
        self._token = self._layer = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(self, logits: Tensor, top_k: int, normalize: bool, shared: Tensor | None) -> Routing:
        """See Ops. The weights are those of the router's own choice."""
        routing = self._ops.route(logits, top_k, normalize, shared)
        tokens = np.arange(self._token, self._token + len(logits)) % len(self._experts)
        routing.experts[:, :top_k] = torch.from_numpy(self._experts[tokens, self._layer])
        self._layer += 1
        if self._layer == self._experts.shape[1]:
            self._layer, self._token = 0, self._token + len(logits)
        return routing
