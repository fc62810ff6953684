"""qwen3_next: Qwen3-Next-80B-A3B. Hybrid attention with grouped linear-attention projections, MTP, flat config."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from mosaic.format.architectures import qwen
from mosaic.format.architectures.config import Config
from mosaic.format.architectures.qwen import Place
from mosaic.format.spec import FeedForward, LayerSpec, ModelSpec
from mosaic.format.tensors import Part, TensorSpec

MODEL_TYPES = ("qwen3_next",)
HF_CLASSES = {MODEL_TYPES[0]: "Qwen3NextForCausalLM"}

skip_list = qwen.skip_list


def parse(config: dict[str, Any], file: Path) -> ModelSpec:
    """The spec of a config.json."""
    fields = Config(config, file)
    qwen.common_refusals(fields)
    kinds = zip(qwen.hybrid_mixers(fields), qwen.flat_feed_forwards(fields), strict=True)
    layers = tuple(LayerSpec(mixer, feed_forward) for mixer, feed_forward in kinds)
    dense = any(layer.feed_forward is FeedForward.DENSE for layer in layers)
    return ModelSpec(
        model_type=MODEL_TYPES[0],
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        norm_offset=1.0,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        layers=layers,
        attention=qwen.attention_spec(fields, gated=True, default_partial=0.25),
        gated_delta=qwen.gated_delta_spec(fields, grouped=True),
        moe=qwen.moe_spec(fields, shared=True, normalize_top_k=fields.flag("norm_topk_prob", True)),
        dense_intermediate_size=fields.integer("intermediate_size") if dense else None,
    )


def tensors(spec: ModelSpec, config: dict[str, Any], names: Collection[str]) -> list[TensorSpec]:
    """The tensor contract; MTP is part of it when any of its tensors is listed."""
    result: list[TensorSpec] = []
    for number, kinds in enumerate(spec.layers):
        path = f"{qwen.FLAT}layers.{number}."
        result += qwen.decoder_layer(spec, kinds, Place(f"layers.{number}.", path, path, Part.DECODER, number))
    result += qwen.outside(spec, Place("", qwen.FLAT, qwen.FLAT, Part.OUTSIDE), Place("", "", "", Part.OUTSIDE))
    if any(name.startswith(qwen.MTP) for name in names):
        result += qwen.mtp_block(spec)
    return result
