"""The shape of the benchmark models: Qwen3.6-35B-A3B with fewer layers, text only. Weights: `random_weights`.

Speed depends on shapes and bytes, not on what the weights say, so a few true layers stand for the 72 GB that no test
machine can download. `sizes` overrides entries of text_config, for tests that must be quick.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mosaic.format import architectures
from mosaic.format.layout import CONFIG_FILE, Entry
from mosaic.format.spec import Mixer
from mosaic.format.tensors import Part, Piece, Role, TensorSpec
from support.listing import load_listing
from support.tiny_tokenizer import END_OF_TEXT, IM_END, UNUSED, write_tokenizer

Json = dict[str, Any]
NESTED = "model.language_model."  # as published; where a contract finds no such name it assumes flat ones


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint; `key` is Mosaic's name of it, or of the first tensor that is stacked in it.

    `whole` is the tensor of the BF16 release of which it is all, or the rows from `first_row`.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    key: str
    layer: int | None  # None: outside the decoder layers
    whole: str
    first_row: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape)

    def entry(self, dtype: str) -> Entry:
        return Entry(self.name, dtype, self.shape)


def model_config(layers: int, vocab: int, sizes: Json | None = None) -> Json:
    """The published config.json with other numbers of layers and rows. The last layer is always full attention."""
    config = load_listing()[0]
    kinds = [Mixer.LINEAR_ATTENTION if (layer + 1) % 4 else Mixer.FULL_ATTENTION for layer in range(layers)]
    config["text_config"] |= {
        "num_hidden_layers": layers,
        "layer_types": [*(kind.value for kind in kinds[:-1]), Mixer.FULL_ATTENTION.value],
        "vocab_size": vocab,
        "mtp_num_hidden_layers": 0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
    } | (sizes or {})
    vision = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return config | {name: UNUSED + place for place, name in enumerate(vision)}


def contract(config: Json) -> list[TensorSpec]:
    """Every tensor of the model, as Mosaic stores it."""
    file = Path(CONFIG_FILE)
    architecture = architectures.find(config, file)
    return architecture.tensors(architecture.parse(config, file), config, (NESTED,))


def fused(config: Json) -> list[Weight]:
    """The tensors of the BF16 release: the experts of a layer stacked."""
    weights: dict[str, Weight] = {}
    for tensor in contract(config):
        weights.setdefault(tensor.pieces[0].name, _weight(tensor, tensor.pieces[0]))
    return list(weights.values())


def separate(config: Json) -> list[Weight]:
    """The tensors of the FP8 release: every expert by itself."""
    return [_weight(tensor, tensor.pieces[-1]) for tensor in contract(config)]


def _weight(tensor: TensorSpec, piece: Piece) -> Weight:
    layer = tensor.layer if tensor.part is Part.DECODER else None
    whole = tensor.pieces[0]
    if piece is whole or whole.index is None:
        return Weight(piece.name, piece.shape, tensor.role, tensor.key, layer, whole.name)
    first_row = whole.index * whole.shape[1] + (whole.rows[0] if whole.rows else 0)
    return Weight(piece.name, piece.shape, tensor.role, tensor.key, layer, whole.name, first_row)


def write_companions(folder: Path, config: Json) -> None:
    """config.json, generation_config.json and a byte-level tokenizer with a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=4))
    generation = {"bos_token_id": END_OF_TEXT, "do_sample": True, "eos_token_id": [IM_END, END_OF_TEXT]}
    generation |= {"pad_token_id": END_OF_TEXT, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=4))
    write_tokenizer(folder, config["text_config"]["vocab_size"])


def by_layer(weights: list[Weight]) -> Iterator[tuple[int | None, list[Weight]]]:
    """(layer, its tensors) for every layer, then (None, the tensors outside)."""
    groups: dict[int | None, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.layer, []).append(weight)
    yield from groups.items()
