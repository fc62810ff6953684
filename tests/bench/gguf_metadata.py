"""What a GGUF of this family says besides its tensors: the numbers of the architecture, and the tokenizer."""

import json
import tempfile
from pathlib import Path

import gguf

from bench.shape import Json, write_companions

ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35MOE]


def add_numbers(writer: gguf.GGUFWriter, text: Json) -> None:
    """The metadata of the architecture."""
    rope, layers = text["rope_parameters"], text["num_hidden_layers"]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("random")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(text["vocab_size"])
    writer.add_block_count(layers)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_dimension_count(int(text["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_expert_count(text["num_experts"])
    writer.add_expert_used_count(text["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
    writer.add_ssm_inner_size(text["linear_num_value_heads"] * text["linear_value_head_dim"])
    writer.add_full_attention_interval(text["full_attention_interval"])
    linear = [kind == "linear_attention" for kind in text["layer_types"]]
    writer.add_array(f"{ARCHITECTURE}.attention.recurrent_layers", linear)  # no method for it in gguf 0.19


def add_tokenizer(writer: gguf.GGUFWriter, config: Json) -> None:
    """The tokenizer of the other forms; it has no merges, but llama.cpp asks for a list, so there is one of NUL NUL."""
    with tempfile.TemporaryDirectory() as folder:
        write_companions(Path(folder), config)
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text())
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    vocab = config["text_config"]["vocab_size"]
    tokens = [f"[PAD{number}]" for number in range(vocab)]
    types = [gguf.TokenType.UNUSED] * vocab
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{tokens[0]} {tokens[0]}"])
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_pad_token_id(tokens.index(settings["pad_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])
