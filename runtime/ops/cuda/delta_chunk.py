"""Gated DeltaNet for several tokens: prompts."""

from torch import Tensor

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.state import DeltaState


def gated_delta_chunk(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
    """See `mosaic.runtime.ops.Ops.gated_delta`: [T, value heads * d_v]; d_k and d_v are powers of two, at least 16.

    Advances `state.conv` and `state.recurrent` in place, but not `state.position`, which is the host's.
    """
    raise NotImplementedError
