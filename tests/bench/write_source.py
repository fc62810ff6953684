"""Writes the BF16 release of a benchmark model: fused experts, files of a few GB, an index; a slice at a time."""

from pathlib import Path

from tqdm import tqdm

from bench.random_weights import RandomWeights
from bench.shape import Json, fused, write_companions
from mosaic.format import layout
from mosaic.format.layout import Entry
from support.shards import split, write_index

FILE_BYTES = 2_800_000_000  # as published: 72 GB in 26 files
SLICE = 1 << 21  # weights


def source_bytes(config: Json) -> int:
    """Bytes of all tensors."""
    return sum(weight.entry("BF16").nbytes for weight in fused(config))


def write_source(out: Path, config: Json, seed: int, quiet: bool = False) -> None:
    """Write the checkpoint directory `out`."""
    weights = {weight.name: weight for weight in fused(config)}
    sizes = {name: weight.entry("BF16").nbytes for name, weight in weights.items()}
    total = sum(sizes.values())
    files = split(sizes, "model", -(-total // FILE_BYTES))
    random = RandomWeights(weights.values(), seed)
    write_companions(out, config)
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None, desc="source") as bar:
        for file, names in files.items():
            with (out / file).open("wb") as stream:
                stream.write(release_header([weights[name].entry("BF16") for name in names]))
                for name in names:
                    for first in range(0, weights[name].count, SLICE):
                        last = min(first + SLICE, weights[name].count)
                        bar.update(stream.write(random.bfloat16(name, first, last).data))
    write_index(out, {name: file for file, names in files.items() for name in names}, float(total))


def release_header(entries: list[Entry]) -> bytes:
    """A safetensors header as the library writes it: padded to 8 bytes, so that hardly any tensor begins on a page."""
    text = layout.header(entries)[8:].rstrip()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
