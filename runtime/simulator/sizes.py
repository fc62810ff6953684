"""The bytes of a model that decoding moves: of a model directory, or of Qwen3.6-35B-A3B where there is none.

The latter is package data, qwen3.6-35b-a3b.json: sizes as the recipe e4m3 makes them.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mosaic.format.jsonfile import read_json
from mosaic.format.spec import FeedForward, Mixer, ModelSpec
from mosaic.format.typed import typed
from mosaic.runtime.simulator import FOLDER

if TYPE_CHECKING:
    from mosaic.runtime.weights import Weights

CONTEXT = 8 << 10  # tokens that a sequence remembers, if the model can
PUBLISHED = FOLDER / "qwen3.6-35b-a3b.json"
FLOAT = 4  # bytes of a float32: recurrent states, and what passes between layers
KV = 2  # bytes of a BF16: keys and values


@dataclass(frozen=True)
class ModelSizes:
    """`dense`: bytes of each decoder layer without its routed experts. `head`: of what comes after the last one."""

    model: str
    spec: ModelSpec
    dense: tuple[int, ...]
    head: int
    expert: int

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The decoder layers that have experts, ascending."""
        return tuple(n for n, layer in enumerate(self.spec.layers) if layer.feed_forward is FeedForward.MOE)

    @property
    def num_experts(self) -> int:
        """In all layers."""
        return len(self.expert_layers) * self.spec.moe.num_experts

    @property
    def context(self) -> int:
        """Tokens that are remembered."""
        return min(CONTEXT, self.spec.max_position_embeddings)

    def remembered(self, layer: int) -> int:
        """Bytes of what a layer remembers: keys and values of the context, or its recurrent states."""
        attention, delta = self.spec.attention, self.spec.gated_delta
        if self.spec.layers[layer].mixer is Mixer.FULL_ATTENTION:
            return self.context * 2 * attention.num_kv_heads * attention.head_dim * KV
        assert delta is not None
        recurrent = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
        return FLOAT * (recurrent + (delta.conv_kernel - 1) * delta.conv_dim)

    def passed(self, layer: int) -> int:
        """Bytes of it that a token reads and writes: a recurrent state both, of keys and values it adds little."""
        both = self.spec.layers[layer].mixer is not Mixer.FULL_ATTENTION
        return self.remembered(layer) * (2 if both else 1)

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return asdict(self)


def published() -> ModelSizes:
    """Qwen3.6-35B-A3B."""
    return typed(ModelSizes, read_json(PUBLISHED), "sizes")


def sizes_of(weights: "Weights", expert: int) -> ModelSizes:
    """Of a model directory, from its headers. `expert`: bytes of a routed expert, the largest if they differ."""
    dense = weights.dense_nbytes()
    layers = tuple(dense[number] for number in range(len(weights.spec.layers)))
    return ModelSizes(weights.folder.name, weights.spec, layers, dense[None], expert)
