"""config.json and generation_config.json of a tiny checkpoint, with every key of the published files and no other.

The keys, their nesting and their quirks (a vision_config that carries its parent's model_type, rope given twice or in
the legacy flat form) are facts about the releases; the values are tiny. Nothing here interprets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.tiny_tokenizer import END_OF_TEXT, IM_END, UNUSED

if TYPE_CHECKING:
    from support.tiny import Tiny

Json = dict[str, Any]


def config(tiny: Tiny) -> Json:
    """The content of config.json."""
    if tiny.vocab < UNUSED + 4:
        raise ValueError(f"vocab: found {tiny.vocab}, expected at least {UNUSED + 4} (bytes, ChatML and vision tokens)")
    if tiny.nested:
        return _multimodal(tiny)
    return _qwen3_next(tiny) if tiny.hybrid else _qwen3_moe(tiny)


def generation_config(tiny: Tiny) -> Json:
    """The content of generation_config.json; as published, its eos list goes beyond the config's."""
    published = {
        "bos_token_id": END_OF_TEXT,
        "do_sample": True,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    return published | ({"transformers_version": "4.57.0.dev0"} if tiny.old else {})


def _linear_attention(tiny: Tiny) -> Json:
    return {
        "full_attention_interval": tiny.interval,
        "linear_conv_kernel_dim": tiny.conv_kernel,
        "linear_key_head_dim": tiny.linear_key_dim,
        "linear_num_key_heads": tiny.linear_key_heads,
        "linear_num_value_heads": tiny.linear_value_heads,
        "linear_value_head_dim": tiny.linear_value_dim,
    }


def _common(tiny: Tiny) -> Json:
    """What the language models of all three families state."""
    return {
        "attention_dropout": 0.0,
        "head_dim": tiny.head_dim,
        "hidden_act": "silu",
        "hidden_size": tiny.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": tiny.moe_inter,
        "num_attention_heads": tiny.heads,
        "num_experts": tiny.experts,
        "num_experts_per_tok": tiny.top_k,
        "num_hidden_layers": tiny.layers,
        "num_key_value_heads": tiny.kv_heads,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": tiny.tie,
        "use_cache": True,
        "vocab_size": tiny.vocab,
    }


def _text(tiny: Tiny) -> Json:
    frequencies = int(tiny.head_dim * tiny.partial_rotary) // 2
    side = frequencies // 3
    text = _common(tiny) | _linear_attention(tiny)
    text |= {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": tiny.dtype,
        "eos_token_id": END_OF_TEXT,
        "layer_types": tiny.layer_types,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": int(tiny.mtp),
        "mtp_use_dedicated_embeddings": False,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": tiny.partial_rotary,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * side, side, side],
            "partial_rotary_factor": tiny.partial_rotary,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": tiny.shared_inter,
    }
    text |= {"mlp_only_layers": []} if tiny.old else {"bos_token_id": END_OF_TEXT}
    return dict(sorted(text.items()))


def vision_config(tiny: Tiny) -> Json:
    """The vision tower's sizes; stated whether or not its tensors are written."""
    return {
        "deepstack_visual_indexes": [],
        "depth": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "model_type": "qwen3_5_moe",
        "num_heads": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": tiny.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _multimodal(tiny: Tiny) -> Json:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": UNUSED,
        "model_type": "qwen3_5_moe",
        "text_config": _text(tiny),
        "tie_word_embeddings": tiny.tie,
        "transformers_version": "4.57.0.dev0" if tiny.old else "4.57.1",
        "video_token_id": UNUSED + 1,
        "vision_config": vision_config(tiny),
        "vision_end_token_id": UNUSED + 2,
        "vision_start_token_id": UNUSED + 3,
    }


def _flat(tiny: Tiny) -> Json:
    """What the two flat families add: sparse-layer rules and rope in its legacy form."""
    return _common(tiny) | {
        "bos_token_id": END_OF_TEXT,
        "decoder_sparse_step": 1,
        "eos_token_id": IM_END,
        "intermediate_size": tiny.dense_inter,
        "mlp_only_layers": list(tiny.mlp_only_layers),
        "norm_topk_prob": tiny.norm_topk_prob,
        "output_router_logits": False,
        "rope_scaling": None,
        "torch_dtype": tiny.dtype,
        "use_sliding_window": False,
    }


def _qwen3_next(tiny: Tiny) -> Json:
    return dict(sorted((_flat(tiny) | _linear_attention(tiny) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "partial_rotary_factor": tiny.partial_rotary,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": tiny.shared_inter,
        "transformers_version": "4.57.0.dev0",
    }).items()))  # fmt: skip


def _qwen3_moe(tiny: Tiny) -> Json:
    return dict(sorted((_flat(tiny) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "max_window_layers": tiny.layers,
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    }).items()))  # fmt: skip
