"""Held-out perplexity of a checkpoint folder, with transformers: float32 arithmetic on the stored weights.

Windows of 256 tokens, each on its own, within one text: a window may span documents, `<|endoftext|>` between them.
Noise between equivalent arithmetics is about 0.1 % of the perplexity.
"""

import argparse
import math
from pathlib import Path

import heldout
import tokenizer
import torch
from model import cross_entropy
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

SHIPPED_TEXTS = Path(__file__).resolve().parent.parent / "heldout"
BATCH = 8


def main() -> None:
    """Prints nats per token and perplexity for each text and for all of them together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder in the published layout")
    parser.add_argument("--heldout", type=Path, default=SHIPPED_TEXTS, help="folder of texts (default: the shipped)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    bpe = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    all_nats, all_tokens = 0.0, 0
    for name, documents in heldout.read(arguments.heldout).items():
        nats, tokens = 0.0, 0
        for windows in heldout.windows(tokenizer.encode(bpe, documents), BATCH):
            ids = torch.from_numpy(windows)
            with torch.no_grad():
                loss = cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
            nats += loss.item() * ids[:, 1:].numel()
            tokens += ids[:, 1:].numel()
        report(name, nats, tokens)
        all_nats, all_tokens = all_nats + nats, all_tokens + tokens
    report("all", all_nats, all_tokens)


def report(name: str, nats: float, tokens: int) -> None:
    """One line of the table."""
    print(f"{name:8s}{nats / tokens:8.4f} nats   perplexity {math.exp(nats / tokens):8.3f}   {tokens} tokens")


if __name__ == "__main__":
    main()
