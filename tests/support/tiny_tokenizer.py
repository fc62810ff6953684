"""A byte-level tokenizer for tiny checkpoints: token id = byte value, then the ChatML tokens.

It is a legal tokenizer.json of the tokenizers library, with the chat template in both places releases keep it. It is
not the Qwen vocabulary: no merges, so any text round-trips and every id can be read by eye.
"""

import json
from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = range(256, 256 + len(SPECIALS))
UNUSED = 256 + len(SPECIALS)  # first id without a token; the embedding's padding rows start here

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja for an embedding of `vocab` rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if vocab < UNUSED:
        raise ValueError(f"vocab: found {vocab}, expected at least {UNUSED}")
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As published, the thinking marks are added tokens that are not special: decoding keeps them.
    added = [AddedToken(text, special="think" not in text, normalized=False) for text in SPECIALS]
    tokenizer.add_tokens(added)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(256 + i): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for i, token in enumerate(added)
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=4))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where printable, else the next free one from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(0x100)]
