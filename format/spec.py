"""ModelSpec: every number of a model that the runtime needs, whatever its family. Not a tensor list (`tensors`).

An architecture file makes it from config.json; the catalog stores it; the runtime is built from it alone.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mosaic.format.typed import typed


class Mixer(StrEnum):
    """What mixes tokens in a decoder layer."""

    FULL_ATTENTION = "full_attention"
    LINEAR_ATTENTION = "linear_attention"


class FeedForward(StrEnum):
    """What follows the mixer in a decoder layer."""

    MOE = "moe"
    DENSE = "dense"


@dataclass(frozen=True)
class LayerSpec:
    """The two halves of one decoder layer."""

    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True)
class AttentionSpec:
    """Full attention with grouped KV heads; rotary embedding on the first `rotary_dim` dims of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool  # the query projection also emits a sigmoid gate per head: rows [query | gate] of each head


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet (linear attention)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    grouped: bool  # projections stored as qkvz and ba, rows grouped by key head (qwen3_next)

    @property
    def key_dim(self) -> int:
        """Rows of all key heads (and of all query heads)."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Rows of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: [query | key | value]."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class MoeSpec:
    """Router, routed experts and, where `shared_intermediate_size` is not 0, a gated shared expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    normalize_top_k: bool


@dataclass(frozen=True)
class ModelSpec:
    """One model. `norm_offset` is what a norm adds to its stored weight: 1 where weights are zero-centred."""

    model_type: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    norm_offset: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    attention: AttentionSpec
    gated_delta: GatedDeltaSpec | None
    moe: MoeSpec
    dense_intermediate_size: int | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "ModelSpec":
        """The inverse of `to_json`; ValueError naming what is missing, unknown or of the wrong type."""
        return typed(cls, value, "spec")
