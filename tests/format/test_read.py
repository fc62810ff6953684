"""Checkpoint.read: the values of many places of many files, however they lie, into fresh or used memory."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mosaic.format import direct
from mosaic.format.errors import InputError
from mosaic.format.source import Checkpoint
from mosaic.format.tensors import Piece

SHAPES = {"a": (6, 300, 7), "b": (512, 33), "c": (5,), "d": (900, 64), "e": (3, 5)}


@pytest.fixture(params=[0, 1, 2, 3])
def checkpoint(request, tmp_path):
    """Two files, their data at odd places: the header is padded by 0 to 3 spaces."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name in "ce" else torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    for file, names in (("one", "abc"), ("two", "de")):
        save_file({name: tensors[name] for name in names}, tmp_path / f"{file}.safetensors")
        data = (tmp_path / f"{file}.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" " * request.param
        (tmp_path / f"{file}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    listed = ",".join(f'"{name}": "{"one" if name in "abc" else "two"}.safetensors"' for name in SHAPES)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{listed}}}}}')
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as opened:
        yield opened, tensors


def requests(seed):
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(40):
        name = rng.choice(list(SHAPES))
        shape, index = SHAPES[name], None
        if len(shape) == 3 and rng.random() < 0.7:
            index, shape = int(rng.integers(shape[0])), shape[1:]
        first, last = sorted(rng.integers(0, shape[0] + 1, 2).tolist())
        rows = None if rng.random() < 0.3 else (first, last)
        result.append((Piece(name, shape, index), rows))
    return result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("memory", [None, direct.Memory()], ids=["fresh", "reused"])
def test_the_values_of_every_place(checkpoint, seed, memory):
    opened, tensors = checkpoint
    for piece, rows in requests(seed):
        values = opened.read(piece, rows, memory)
        expected = tensors[piece.name]
        expected = expected if piece.index is None else expected[piece.index]
        expected = expected if rows is None else expected[rows[0] : rows[1]]
        assert values.flags.aligned
        assert np.array_equal(values.astype(np.float32), expected.float().numpy())


def test_a_file_that_became_shorter(checkpoint):
    opened, _ = checkpoint
    info = opened.tensors["b"]
    with info.file.open("r+b") as stream:
        stream.truncate(info.offset + 100)
    with pytest.raises(InputError, match="became shorter") as caught:
        opened.read(Piece("b", SHAPES["b"]))
    assert caught.value.facts["tensor"] == "b"
    assert str(info.offset + 100) in caught.value.facts["found"]
