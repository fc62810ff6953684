"""qwen3_5_moe: Qwen3.5-35B-A3B and Qwen3.6-35B-A3B. Hybrid attention, fused or per-expert experts, vision, MTP."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mosaic.format.architectures import qwen
from mosaic.format.architectures.config import Config
from mosaic.format.architectures.qwen import Place
from mosaic.format.spec import FeedForward, LayerSpec, ModelSpec
from mosaic.format.tensors import Part, Role, TensorSpec

NESTED_TYPE = "qwen3_5_moe"
MODEL_TYPES = (NESTED_TYPE, "qwen3_5_moe_text")
HF_CLASSES = dict(zip(MODEL_TYPES, ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"), strict=True))

skip_list = qwen.skip_list


def parse(config: dict[str, Any], file: Path) -> ModelSpec:
    """The spec of a config.json, nested (as published) or flat (text only)."""
    outer = Config(config, file)
    text = outer.section("text_config") if "text_config" in config else outer
    qwen.common_refusals(text)
    text.require("mlp_only_layers", [], None)
    text.require("decoder_sparse_step", 1, None)
    text.require("attn_output_gate", True)
    return ModelSpec(
        model_type=NESTED_TYPE,
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        rms_norm_eps=text.number("rms_norm_eps"),
        norm_offset=1.0,
        tie_embeddings=text.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", False)),
        layers=tuple(LayerSpec(mixer, FeedForward.MOE) for mixer in qwen.hybrid_mixers(text)),
        attention=qwen.attention_spec(text, gated=True, default_partial=0.25),
        gated_delta=qwen.gated_delta_spec(text, grouped=False),
        moe=qwen.moe_spec(text, shared=True, normalize_top_k=True),  # this family always renormalises
        dense_intermediate_size=None,
    )


def tensors(spec: ModelSpec, config: dict[str, Any], names: Collection[str]) -> list[TensorSpec]:
    """The tensor contract; vision and MTP are part of it when any of their tensors is listed."""
    text = Place("", qwen.NESTED if "text_config" in config else qwen.FLAT, qwen.source_prefix(names), Part.OUTSIDE)
    result: list[TensorSpec] = []
    for number, kinds in enumerate(spec.layers):
        path = f"layers.{number}."
        layer = Place(path, text.name + path, text.source + path, Part.DECODER, number)
        result += qwen.decoder_layer(spec, kinds, layer)
    result += qwen.outside(spec, text, Place("", "", "", Part.OUTSIDE))
    if any(name.startswith(qwen.VISION) for name in names):
        result += _vision(Config(config, Path("config.json")))
    if any(name.startswith(qwen.MTP) for name in names):
        result += qwen.mtp_block(spec)
    return result


def _vision(config: Config) -> Iterator[TensorSpec]:
    """The vision tower, copied through whole; Mosaic does not run it."""
    numbers = config.section("vision_config")
    numbers.require("deepstack_visual_indexes", [], None)
    hidden, inner = numbers.integer("hidden_size"), numbers.integer("intermediate_size")
    patch = (numbers.integer("temporal_patch_size"), numbers.integer("patch_size"), numbers.integer("patch_size"))
    merged = hidden * numbers.integer("spatial_merge_size") ** 2
    place = Place("vision.", qwen.VISION, qwen.VISION, Part.VISION)

    def tensor(name: str, *shape: int) -> TensorSpec:
        return place.tensor(name, name, shape, Role.VISION)

    def layer(name: str, *shape: int) -> Iterator[TensorSpec]:
        yield tensor(f"{name}.weight", *shape)
        yield tensor(f"{name}.bias", shape[0])

    yield from layer("patch_embed.proj", hidden, numbers.integer("in_channels"), *patch)
    yield tensor("pos_embed.weight", numbers.integer("num_position_embeddings"), hidden)
    for block in (f"blocks.{number}" for number in range(numbers.integer("depth"))):
        yield from layer(f"{block}.norm1", hidden)
        yield from layer(f"{block}.norm2", hidden)
        yield from layer(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from layer(f"{block}.attn.proj", hidden, hidden)
        yield from layer(f"{block}.mlp.linear_fc1", inner, hidden)
        yield from layer(f"{block}.mlp.linear_fc2", hidden, inner)
    yield from layer("merger.norm", hidden)
    yield from layer("merger.linear_fc1", merged, merged)
    yield from layer("merger.linear_fc2", numbers.integer("out_hidden_size"), merged)
