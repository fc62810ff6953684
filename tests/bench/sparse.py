"""Fills and empties the tensors of a checkpoint whose files are holes; never touches what the converter samples."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from bench.checks import check_room
from bench.random_weights import RandomWeights
from bench.shape import Json, Weight, by_layer, fused, write_companions
from bench.write_source import release_header
from mosaic.format import layout
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.source import SAMPLE
from support.shards import write_index

OUTSIDE = None  # instead of a range of layers
SLICE = 1 << 22  # bytes
WIDTH = 2  # bytes of a BF16
KEEP_SIZE, PUNCH_HOLE = 1, 2  # modes of fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def make(folder: Path, config: Json, seed: int) -> None:
    """Write a checkpoint of holes, a file per layer and one for the tensors outside, and the samples."""
    write_companions(folder, config)
    random = RandomWeights(fused(config), seed)
    groups = list(by_layer(fused(config)))
    files: dict[str, str] = {}
    for number, (_, weights) in enumerate(groups, 1):
        file = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries = [weight.entry("BF16") for weight in weights]
        header = release_header(entries)
        with file.open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(entry.nbytes for entry in entries))
        for weight, info in _places(file, weights):
            _write(random, weight, info, *_sampled(info))
        files |= {weight.name: file.name for weight in weights}
    write_index(folder, files, float(sum(WIDTH * weight.count for _, weights in groups for weight in weights)))


def fill(folder: Path, layers: range | None, seed: int) -> None:
    """Fill the tensors of these layers."""
    config, chosen = _chosen(folder, layers)
    check_room(folder, sum(info.nbytes for _, info in chosen))
    random = RandomWeights(fused(config), seed)
    for weight, info in chosen:
        for first, last in _unsampled(info):
            _write(random, weight, info, first, last)


def punch(folder: Path, layers: range | None) -> None:
    """Empty the tensors of these layers."""
    for _, info in _chosen(folder, layers)[1]:
        with info.file.open("r+b") as stream:
            for first, last in _unsampled(info):
                mode = KEEP_SIZE | PUNCH_HOLE
                if _libc.fallocate(stream.fileno(), mode, info.offset + first, last - first):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error), str(info.file))


Place = tuple[Weight, TensorInfo]


def _chosen(folder: Path, layers: range | None) -> tuple[Json, list[Place]]:
    """config.json, and the tensors of these layers with their places."""
    config, index = read_json(folder / layout.CONFIG_FILE), read_json(folder / layout.INDEX_FILE)
    count = config["text_config"]["num_hidden_layers"]
    if layers is not OUTSIDE and layers.stop > count:
        raise InputError("no such layers", file=folder, found=f"up to {layers.stop}", expected=f"up to {count}",
                         remedy="choose others")  # fmt: skip
    places: list[Place] = []
    for layer, weights in by_layer(fused(config)):
        if layer is None if layers is OUTSIDE else layer in layers:
            places += _places(folder / index["weight_map"][weights[0].name], weights)
    return config, places


def _places(file: Path, weights: list[Weight]) -> list[Place]:
    header = read_header(file)
    return [(weight, header[weight.name]) for weight in weights]


def _sampled(info: TensorInfo) -> tuple[int, int]:
    """The bytes of a tensor that Checkpoint.sample reads."""
    size = min(SAMPLE, info.nbytes)
    first = (info.nbytes - size) // 2
    return first, first + size


def _unsampled(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """The other bytes of a tensor, if there are any."""
    first, last = _sampled(info)
    yield from ((begin, end) for begin, end in ((0, first), (last, info.nbytes)) if begin < end)


def _write(random: RandomWeights, weight: Weight, info: TensorInfo, first: int, last: int) -> None:
    """Write bytes first..last of a tensor."""
    with info.file.open("r+b") as stream:
        stream.seek(info.offset + first)
        for begin in range(first, last, SLICE):
            end = min(begin + SLICE, last)
            stream.write(random.bfloat16(weight.name, begin // WIDTH, end // WIDTH).data)
