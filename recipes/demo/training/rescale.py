"""Multiplies pairs of matrices by 2^k and 2^-k: block scales then differ, while the model stays the same function.

In freshly trained weights all block scales are nearly equal: a converter or kernel that takes an expert's scales from
its neighbour barely changes the perplexity (24.65 became 24.69). After this it does (1,268). Per routed expert and for
the shared expert the pair is up_proj and down_proj, per key/value head v_proj and the columns of o_proj that read it.
The gate half of gate_up_proj stays: it goes through a nonlinearity. bfloat16 times a power of two is exact.

Works on a checkpoint folder in the published layout and writes another one.
"""

import argparse
import random
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST_EXPONENT = 4
SEED = 0


def rescale(weights: dict[str, Tensor], rng: random.Random) -> None:
    """Rescales all pairs in place; factors are drawn in the order of the names."""

    def scale_pair(first: Tensor, second: Tensor) -> None:
        factor = 2.0 ** rng.randint(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        first *= factor
        second *= 1 / factor

    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):  # [experts, 2 width, hidden], up in the second half
            width = tensor.shape[1] // 2
            for gate_up, down in zip(tensor, weights[name.replace("gate_up_proj", "down_proj")], strict=True):
                scale_pair(gate_up[width:], down)
        elif name.endswith("shared_expert.up_proj.weight"):
            scale_pair(tensor, weights[name.replace("up_proj", "down_proj")])
        elif name.endswith("self_attn.v_proj.weight"):  # [kv heads x head_dim, hidden]
            output = weights[name.replace("v_proj", "o_proj")]  # [hidden, heads x head_dim]
            (head_dim,) = weights[name.replace("v_proj", "q_norm")].shape
            kv_heads = tensor.shape[0] // head_dim
            for value, columns in zip(tensor.chunk(kv_heads, 0), output.chunk(kv_heads, 1), strict=True):
                scale_pair(value, columns)


def main() -> None:
    """Copies a checkpoint folder, rescaled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="checkpoint folder, from export.py")
    parser.add_argument("target", type=Path, help="folder to write to")
    arguments = parser.parse_args()

    arguments.target.mkdir(parents=True, exist_ok=True)
    shards = {}
    for file in sorted(arguments.source.iterdir()):
        if file.suffix == ".safetensors":
            shards[file.name] = load_file(file)
        else:
            shutil.copyfile(file, arguments.target / file.name)
    weights = {name: shard[name] for shard in shards.values() for name in sorted(shard)}
    rescale(weights, random.Random(SEED))
    for file_name, shard in shards.items():
        save_file(shard, arguments.target / file_name, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
