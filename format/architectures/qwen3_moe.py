"""qwen3_moe: Qwen3-30B-A3B. Full attention in every layer, no gate, no shared expert, no MTP, flat config."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from mosaic.format.architectures import qwen
from mosaic.format.architectures.config import Config
from mosaic.format.architectures.qwen import Place
from mosaic.format.spec import FeedForward, LayerSpec, Mixer, ModelSpec
from mosaic.format.tensors import Part, TensorSpec

MODEL_TYPES = ("qwen3_moe",)
HF_CLASSES = {MODEL_TYPES[0]: "Qwen3MoeForCausalLM"}

skip_list = qwen.skip_list


def parse(config: dict[str, Any], file: Path) -> ModelSpec:
    """The spec of a config.json."""
    fields = Config(config, file)
    qwen.common_refusals(fields)
    layers = tuple(LayerSpec(Mixer.FULL_ATTENTION, kind) for kind in qwen.flat_feed_forwards(fields))
    dense = any(layer.feed_forward is FeedForward.DENSE for layer in layers)
    return ModelSpec(
        model_type=MODEL_TYPES[0],
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        norm_offset=0.0,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        layers=layers,
        attention=qwen.attention_spec(fields, gated=False, default_partial=1.0),
        gated_delta=None,
        moe=qwen.moe_spec(fields, shared=False, normalize_top_k=fields.flag("norm_topk_prob", False)),
        dense_intermediate_size=fields.integer("intermediate_size") if dense else None,
    )


def tensors(spec: ModelSpec, config: dict[str, Any], names: Collection[str]) -> list[TensorSpec]:
    """The tensor contract."""
    result: list[TensorSpec] = []
    for number, kinds in enumerate(spec.layers):
        path = f"{qwen.FLAT}layers.{number}."
        result += qwen.decoder_layer(spec, kinds, Place(f"layers.{number}.", path, path, Part.DECODER, number))
    result += qwen.outside(spec, Place("", qwen.FLAT, qwen.FLAT, Part.OUTSIDE), Place("", "", "", Part.OUTSIDE))
    return result
