"""config.json of the published flat models, as far as Mosaic reads it (MODELS.md, section 1)."""

FLAT = {
    "hidden_size": 2048, "num_hidden_layers": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "rope_scaling": None, "vocab_size": 151936, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
NEXT_80B = FLAT | {
    "model_type": "qwen3_next", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
    "max_position_embeddings": 262144,
}  # fmt: skip
MOE_30B = FLAT | {
    "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "rope_theta": 1000000, "max_position_embeddings": 40960, "sliding_window": None, "max_window_layers": 48,
    "attention_bias": False,
}  # fmt: skip
