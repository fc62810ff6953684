"""Writes a trained checkpoint in the published layout of qwen3_5_moe: what a user of the family would download.

The nested Qwen3_5MoeForConditionalGeneration configuration, two safetensors shards and an index, the tokenizer in both
of its spellings, chat template and generation defaults. The weights become bfloat16, except those the family keeps in
float32. A tiny vision tower with random weights comes along, because the published checkpoints have one and a converter
has to meet it. The multi-token-prediction head is absent.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from model import Shape
from safetensors.torch import save_file
from tokenizer import END_OF_TEXT
from torch import Tensor
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

# Written by hand, and kept where it is shipped.
CHAT_TEMPLATE = Path(__file__).resolve().parent.parent / "checkpoint" / "chat_template.jinja"
POSITIONS = 32768
STAYS_FLOAT32 = ("A_log", "linear_attn.norm.weight")
TEXT_PREFIX, PUBLISHED_PREFIX, VISION_PREFIX = "model.", "model.language_model.", "model.visual."
SHARDS = 2
VISION_SEED = 0


def text_config(shape: Shape, end_of_text: int) -> dict[str, Any]:
    """The `text_config` part of config.json."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end_of_text,
        "full_attention_interval": shape.full_attention_interval,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "layer_types": [
            "full_attention" if shape.is_full_attention(layer) else "linear_attention" for layer in range(shape.layers)
        ],
        "linear_conv_kernel_dim": shape.conv,
        "linear_key_head_dim": shape.linear_key_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_value_head_dim": shape.linear_value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": POSITIONS,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": shape.expert_width,
        "mtp_num_hidden_layers": 0,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],  # rotary_dim / 2 frequencies: time, height, width
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "rope_theta": int(shape.rope_theta),
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": shape.shared_width,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def vision_config(shape: Shape) -> dict[str, Any]:
    """The `vision_config` part of config.json: one layer of 64 channels."""
    return {
        "deepstack_visual_indexes": [],
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "model_type": "qwen3_5_moe_vision",
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": shape.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def model_config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    """config.json, given the special tokens' ids."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_5_moe",
        "text_config": text_config(shape, ids[END_OF_TEXT]),
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision_config(shape),
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json: sampling, because greedy decoding of this model loops."""
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "5.24.0",
    }


def tokenizer_config(added_tokens: list[dict[str, Any]], chat_template: str) -> dict[str, Any]:
    """tokenizer_config.json, given `added_tokens` of tokenizer.json."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(token["id"]): {flag: token[flag] for flag in flags} for token in added_tokens},
        "additional_special_tokens": [
            token["content"] for token in added_tokens if token["special"] and token["content"] != END_OF_TEXT
        ],
        "bos_token": None,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": POSITIONS,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2TokenizerFast",
        "unk_token": None,
    }


def published_weights(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Casts and renames the trained weights, adds the vision tower, and checks names and shapes with transformers."""
    published = {}
    for name, tensor in weights.items():
        dtype = torch.float32 if name.endswith(STAYS_FLOAT32) else torch.bfloat16
        renamed = PUBLISHED_PREFIX + name.removeprefix(TEXT_PREFIX) if name.startswith(TEXT_PREFIX) else name
        published[renamed] = tensor.to(dtype).contiguous()

    torch.manual_seed(VISION_SEED)
    not_arguments = ("architectures", "model_type", "transformers_version")
    arguments = {key: value for key, value in config.items() if key not in not_arguments}
    expected = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**arguments)).state_dict()
    for name, tensor in expected.items():
        if name.startswith(VISION_PREFIX):
            published[name] = tensor.to(torch.bfloat16).contiguous()

    wrong = sorted(
        name
        for name in published.keys() | expected.keys()
        if name not in published or name not in expected or published[name].shape != expected[name].shape
    )
    if wrong:
        raise ValueError(
            f"these tensors are not those of transformers' model: {wrong}; model.py and this file disagree"
        )
    return published


def write_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    """Writes the tensors by name into SHARDS files of about equal size, and the index."""
    total = sum(tensor.nbytes for tensor in weights.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name in sorted(weights):
        shards[written * SHARDS // total][name] = weights[name]
        written += weights[name].nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model.safetensors-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(folder: Path, tokenizer_json: Path) -> None:
    """Writes tokenizer.json as it is and, drawn from it, the older vocab.json and merges.txt."""
    tokenizer = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    shutil.copyfile(tokenizer_json, folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer["added_tokens"], template))
    vocabulary = json.dumps(tokenizer["model"]["vocab"], ensure_ascii=False)
    (folder / "vocab.json").write_text(vocabulary, encoding="utf-8")
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented, and with the tokenizer's characters readable."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Exports one training checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="WORK/stage4.pt, from train.py")
    parser.add_argument("tokenizer", type=Path, help="WORK/tokenizer.json, from tokenizer.py")
    parser.add_argument("out", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    state = torch.load(arguments.checkpoint, weights_only=True)
    tokenizer = json.loads(arguments.tokenizer.read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = model_config(Shape(**state["shape"]), ids)
    weights = published_weights(state["weights"], config)

    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "config.json", config)
    write_json(arguments.out / "generation_config.json", generation_config(ids))
    write_tokenizer(arguments.out, arguments.tokenizer)
    write_shards(arguments.out, weights)
    print(f"{sum(tensor.numel() for tensor in weights.values())} parameters, {state['tokens']} tokens trained on")


if __name__ == "__main__":
    main()
