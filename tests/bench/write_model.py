"""Writes a model directory of random E4M3 weights through the converter itself, from a source that has no bytes.

The source is an FP8 release whose headers are real and whose weights are drawn when the converter asks for them.
So every file is by the format of the day, whatever report or catalog say, and codes cost no quantisation.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bench.random_weights import RandomWeights
from bench.shape import Json, Weight, by_layer, fused, separate, write_companions
from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format import direct, e4m3, layout
from mosaic.format.layout import Entry
from mosaic.format.source import SAMPLE, Checkpoint, Rows
from mosaic.format.tensors import QUANTIZABLE, Piece, scale_name
from support.shards import write_index

SCALE_SUFFIX = scale_name("")


def model_bytes(config: Json) -> int:
    """About the bytes of all tensors: one for each weight, and another for those that stay BF16."""
    weights = fused(config)
    return sum(weight.count * (1 if _quantized(weight) else 2) for weight in weights)


def write_model(out: Path, config: Json, seed: int, quiet: bool = False, recipe: str = "e4m3") -> None:
    """Write the model directory `out`, which must be absent or empty."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-headers-", dir=out.parent) as folder:
        _write_headers(Path(folder), config)
        with RandomCheckpoint(Path(folder), separate(config), RandomWeights(fused(config), seed)) as source:
            plan = make_plan(source, load_recipe(recipe))
            convert(plan, out, workers=os.cpu_count() or 1, overwrite=False, quiet=quiet)


def _write_headers(folder: Path, config: Json) -> None:
    """The FP8 release without its weights: companions, index, and files that are holes after their headers."""
    write_companions(folder, config)
    files: dict[str, str] = {}
    total = 0
    layers = config["text_config"]["num_hidden_layers"]
    for layer, weights in by_layer(separate(config)):
        entries: list[Entry] = []
        for weight in weights:
            entries.append(weight.entry("F8_E4M3" if _quantized(weight) else "BF16"))
            if _quantized(weight):
                entries.append(Entry(scale_name(weight.name), "BF16", e4m3.grid(weight.shape)))
        file = layout.OUTSIDE_FILE if layer is None else layout.layer_file(layer, layers)
        header, nbytes = layout.header(entries), sum(entry.nbytes for entry in entries)
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + nbytes)
        files |= {entry.name: file for entry in entries}
        total += nbytes
    write_index(folder, files, total)


def _quantized(weight: Weight) -> bool:
    return weight.role in QUANTIZABLE and weight.layer is not None  # the head is not


class RandomCheckpoint(Checkpoint):
    """An FP8 release with real headers and drawn weights; no tensor is stacked in another."""

    def __init__(self, folder: Path, weights: list[Weight], random: RandomWeights) -> None:
        super().__init__(folder)
        self._weights = {weight.name: weight for weight in weights}
        self._random = random

    def read(self, piece: Piece, rows: Rows | None = None, memory: direct.Memory | None = None) -> NDArray[Any]:
        """Draw instead."""
        return self._draw(piece, rows)

    def _draw(self, piece: Piece, rows: Rows | None) -> NDArray[Any]:
        """The drawn values of a tensor, or of some of its rows."""
        info = self.tensors[piece.name]
        weight = self._weights[piece.name.removesuffix(SCALE_SUFFIX)]
        if piece.name != weight.name:
            scales = self._random.scales(weight.whole, weight.first_row, weight.first_row + weight.shape[0])
            return scales[slice(*rows)] if rows else scales
        first, last = rows or (0, info.shape[0])
        if info.dtype == "F8_E4M3":
            return self._random.codes(weight.whole, weight.first_row + first, weight.first_row + last)
        row = weight.count // info.shape[0]
        values: NDArray[Any] = self._random.bfloat16(weight.name, first * row, last * row).view(e4m3.BFLOAT16)
        return values.reshape(-1, *info.shape[1:])

    def sample(self, name: str) -> bytes:
        """Some bytes that depend on the seed."""
        return self._draw(Piece(name, self.tensors[name].shape), (0, 1)).tobytes()[:SAMPLE]
