"""The tensor contract: what a model consists of, named three ways. Filled in by `architectures`.

A tensor has a *key* (Mosaic's own name, what the runtime asks for), a *name* (Hugging Face's, in the files) and a
*role* (what it is for, what recipes speak of). `pieces` say under which names and as which slice it may stand in a
source checkpoint.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a tensor is for."""

    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"
    ROUTER = "router"
    GATE = "gate"  # shared-expert gate, decay and beta projections: few rows, never quantised
    NORM = "norm"
    CONVOLUTION = "convolution"
    DECAY = "decay"
    MTP_PROJECTION = "mtp_projection"
    VISION = "vision"


#: Roles whose matrices may be stored as E4M3; everything else is built unquantised by every serving engine.
QUANTIZABLE = frozenset(
    {
        Role.ROUTED_EXPERTS,
        Role.SHARED_EXPERT,
        Role.DENSE_MLP,
        Role.ATTENTION,
        Role.LINEAR_ATTENTION,
        Role.LM_HEAD,
    }
)


class Part(StrEnum):
    """Which part of the model a tensor belongs to; `VISION` and `MTP` are there whole or not at all."""

    DECODER = "decoder"
    OUTSIDE = "outside"  # embeddings, final norm, lm_head
    MTP = "mtp"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Piece:
    """`name[index, rows]` of a source checkpoint: all of a tensor, or one matrix (or some rows) of a stacked one."""

    name: str
    shape: tuple[int, ...]  # of the whole source tensor
    index: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the output. `fusion` names the linears that engines merge: all are quantised or none."""

    key: str
    name: str
    shape: tuple[int, ...]
    role: Role
    part: Part
    pieces: tuple[Piece, ...]
    layer: int | None = None
    expert: int | None = None
    fusion: str | None = None

    @property
    def scale_name(self) -> str:
        """Name of the tensor's block scales, if it is stored as E4M3."""
        return scale_name(self.name)


def scale_name(name: str) -> str:
    """Name of the block scales (multipliers) that belong to a weight."""
    return f"{name}_scale_inv"
