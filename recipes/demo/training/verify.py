"""Checks an exported checkpoint against the model that was trained: same tensors, same loss.

Loads the folder with both of transformers' classes for this architecture (the text model alone, and the whole model
with its vision tower) and compares their loss on a few held-out windows with the training model's.
"""

import argparse
from pathlib import Path

import heldout
import numpy as np
import tokenizer
import torch
from model import LanguageModel, Shape, cross_entropy
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

ROWS = 2  # windows of each text
# Nats. The training model multiplies in bfloat16 (8 bits of significand, 2^-9 relative error per rounding) and its
# weights were rounded to bfloat16 on export; over thousands of tokens these errors mostly cancel. A wrong layout costs
# tenths of a nat or more.
TOLERANCE = 0.01


def main() -> None:
    """Compares, prints the losses, and fails if they differ or tensors are missing or left over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="WORK/stage4.pt, from train.py")
    parser.add_argument("folder", type=Path, help="what export.py or rescale.py wrote")
    parser.add_argument("heldout", type=Path, help="WORK/heldout, from corpus.py")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")

    bpe = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    texts = heldout.read(arguments.heldout).values()
    rows = [next(heldout.windows(tokenizer.encode(bpe, documents), ROWS)) for documents in texts]
    ids = torch.from_numpy(np.concatenate(rows))

    state = torch.load(arguments.checkpoint, weights_only=True)
    trained = LanguageModel(Shape(**state["shape"]))
    trained.load_state_dict(state["weights"])
    with torch.no_grad():
        expected = cross_entropy(trained(ids[:, :-1])[0], ids[:, 1:]).item()
    print(f"as trained: {expected:.6f} nats")

    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
        exported, report = loader.from_pretrained(arguments.folder, dtype=torch.float32, output_loading_info=True)
        with torch.no_grad():
            loss = cross_entropy(exported(input_ids=ids[:, :-1]).logits, ids[:, 1:]).item()
        print(f"{type(exported).__name__}: {loss:.6f} nats")
        problems = {kind: found for kind, found in report.items() if found}
        if problems:
            raise SystemExit(f"{arguments.folder}: transformers reports {problems}; export.py must write its names")
        if abs(loss - expected) > TOLERANCE:
            raise SystemExit(f"{arguments.folder}: loss {loss:.4f}, as trained {expected:.4f}: not the same model")


if __name__ == "__main__":
    main()
