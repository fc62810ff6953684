"""Trains the byte-level BPE tokenizer and writes the corpus as token arrays.

The tokenizer follows the family's: same pre-tokenisation, same special tokens, digits one by one; only the vocabulary
is small. Learned entries come first, special tokens last, so `<|endoftext|>` is 4080 and `</think>` 4095.

    WORK/tokenizer.json
    WORK/train.bin, WORK/val_{bible,austen,chat}.bin    [tokens] little-endian uint16, `<|endoftext|>` after each text
"""

import argparse
import json
from pathlib import Path

import heldout
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 4096
TOKEN_DTYPE = np.dtype("<u2")
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # one token each, yet visible when decoded
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Learns the merges on `documents`, then adds the special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCABULARY}: use more text")
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.int64]:
    """Returns [tokens]: the documents one after the other, `<|endoftext|>` after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.array([token for e in tokenizer.encode_batch(documents) for token in (*e.ids, end)], dtype=np.int64)


def main() -> None:
    """Reads what corpus.py wrote; writes the tokenizer and the arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder that corpus.py wrote to")
    work: Path = parser.parse_args().work

    documents = json.loads((work / "train.json").read_text(encoding="utf-8"))
    chapters = [document for document in documents if TURN_START not in document]  # chats repeat their sentences
    tokenizer = train_tokenizer(chapters)
    tokenizer.save(str(work / "tokenizer.json"))

    arrays = {"train": documents} | {f"val_{name}": texts for name, texts in heldout.read(work / "heldout").items()}
    for name, texts in arrays.items():
        tokens = encode(tokenizer, texts)
        tokens.astype(TOKEN_DTYPE).tofile(work / f"{name}.bin")
        print(f"{name}: {len(tokens)} tokens, {sum(len(text.encode()) for text in texts) / len(tokens):.3f} bytes each")


if __name__ == "__main__":
    main()
