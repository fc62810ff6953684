"""Tiny random checkpoints in the published on-disk layout of the three Qwen MoE families.

They exist so that every test can have a legal BF16 release to convert and run within a second. They are not small
models: the weights are noise, shaped so that activations stay sane and so that mistakes show. Above all the 128x128
blocks of every matrix differ widely in size (see tiny_weights): a reader that mixes up two scales gets it wrong.

Every tensor is drawn from a generator of its own, seeded by its name. So the same seed gives the same weights in the
fused and the per-expert layout, with more layers, with or without MTP and vision, and in variants 3.5 and 3.6 (but for
the rounding of what 3.5 keeps in F32). And qwen3_next with equal options is the very same function as qwen3_5_moe, its
GDN rows merely grouped otherwise.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from support.shards import split, write_shards
from support.tiny_config import config, generation_config
from support.tiny_tokenizer import write_tokenizer
from support.tiny_weights import build_tensors

__all__ = ["Tiny", "build_tensors", "config", "write_checkpoint", "write_tokenizer"]

CHOICES = {
    "family": ("qwen3_5_moe", "qwen3_next", "qwen3_moe"),
    "variant": ("3.5", "3.6"),
    "experts_layout": ("fused", "per_expert"),
    "decay": ("normal", "strong"),
    "dtype": ("bfloat16", "float32", "float16"),
}


@dataclass(frozen=True)
class Tiny:
    """One tiny checkpoint. The default sizes make every matrix that releases quantise a multiple of 128 both ways."""

    family: str = "qwen3_5_moe"
    variant: str = "3.6"  # qwen3_5_moe only. 3.5: F32 A_log and GDN norm, per-expert MTP, other file names
    layers: int = 4  # three linear and one full, in the hybrid families
    interval: int = 4  # every interval-th layer is full attention
    hidden: int = 256
    vocab: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    partial_rotary: float = 0.25  # hybrid families; qwen3_moe rotates whole heads
    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_key_dim: int = 32
    linear_value_dim: int = 32
    conv_kernel: int = 4
    decay: str = "normal"  # "strong": exp(g) from about 1 down to an underflow, by head
    experts: int = 16
    top_k: int = 4
    moe_inter: int = 128
    shared_inter: int = 128  # hybrid families
    experts_layout: str = "fused"  # qwen3_5_moe only; the flat families are always per-expert
    norm_topk_prob: bool = True  # flat families; qwen3_5_moe always renormalises
    mlp_only_layers: tuple[int, ...] = ()  # flat families: these layers get a dense MLP
    dense_inter: int = 256
    mtp: bool = True  # hybrid families
    visual: bool = True  # qwen3_5_moe
    tie: bool = False
    dtype: str = "bfloat16"  # storage
    shards: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for field, legal in CHOICES.items():
            if getattr(self, field) not in legal:
                raise ValueError(f"{field}: found {getattr(self, field)!r}, expected one of {legal}")
        if self.mlp_only_layers and self.family == "qwen3_5_moe":
            raise ValueError("mlp_only_layers: transformers' qwen3_5_moe has MoE layers only; use a flat family")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k: found {self.top_k}, expected 1..{self.experts}")

    @property
    def hybrid(self) -> bool:
        """Gated DeltaNet layers, zero-centred norms, gated attention and a shared expert."""
        return self.family != "qwen3_moe"

    @property
    def nested(self) -> bool:
        """Language model below `text_config` and `model.language_model.`, as in the multimodal releases."""
        return self.family == "qwen3_5_moe"

    @property
    def fused(self) -> bool:
        """Trunk experts as 3-D tensors."""
        return self.nested and self.experts_layout == "fused"

    @property
    def old(self) -> bool:
        """The quirks of Qwen3.5-35B-A3B."""
        return self.nested and self.variant == "3.5"

    @property
    def layer_types(self) -> list[str]:
        if not self.hybrid:
            return ["full_attention"] * self.layers
        return ["linear_attention" if (i + 1) % self.interval else "full_attention" for i in range(self.layers)]


def write_checkpoint(tiny: Tiny, folder: Path) -> None:
    """Write config.json, generation_config.json, the sharded weights and their index. No tokenizer: write_tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(tiny), indent=4))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(tiny), indent=4))
    tensors = build_tensors(tiny)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    groups = split(sizes, "model.safetensors" if tiny.old else "model", tiny.shards)
    files = {file: {name: tensors[name] for name in names} for file, names in groups.items()}
    write_shards(folder, files, float_total=tiny.nested and not tiny.old)
