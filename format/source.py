"""A checkpoint directory, read lazily: config, index and headers at once, weights as asked for, never mapped.

The index decides: what it lists must exist exactly once; files and tensors that it does not list are ignored and named
in `unlisted`. Reads go into owned buffers, so that memory stays bounded and a file that shrinks is an error and not a
SIGBUS. Several threads may read.
"""

import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mosaic.format import direct
from mosaic.format.e4m3 import BFLOAT16, BLOCK
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import CONFIG_FILE, INDEX_FILE, WIDTH
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.tensors import Piece, scale_name

SINGLE_FILE = "model.safetensors"
SAMPLE = 4 << 10

#: numpy types of the dtypes a weight may have. E4M3 codes stay bytes.
NUMPY: dict[str, np.dtype[Any]] = {
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(np.uint8),
}


Rows = tuple[int, int]


class Checkpoint:
    """A directory with config.json and safetensors files. A context manager: it holds the opened files."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(
                "no such checkpoint directory",
                file=folder,
                found="nothing" if not folder.exists() else "a file",
                expected="a directory with config.json and safetensors files",
                remedy="give the directory a Hugging Face checkpoint was downloaded to",
            )
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(
                "not a checkpoint directory",
                file=folder,
                found=f"no {CONFIG_FILE}",
                expected=f"a directory with {CONFIG_FILE} and safetensors files",
                remedy="give the directory a Hugging Face checkpoint was downloaded to, or finish the download",
            )
        self.folder = folder
        self.config = read_json(folder / CONFIG_FILE)
        self.index = folder / INDEX_FILE
        tensors, self.unlisted = self._read_headers()
        self.tensors = _codes_in_bytes(tensors) if is_block_fp8(self.config) else tensors
        self._files = ExitStack()
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._files.close()

    @property
    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    def dtype(self, piece: Piece) -> str:
        """Safetensors dtype of a piece."""
        return self.tensors[piece.name].dtype

    def read(self, piece: Piece, rows: Rows | None = None, memory: direct.Memory | None = None) -> NDArray[Any]:
        """The values of a piece, or of some of its rows; E4M3 as uint8 codes, bfloat16 through ml_dtypes.

        In `memory` if it is given: good until something else is read there.
        """
        info = self.tensors[piece.name]
        dtype = NUMPY[info.dtype]
        first, shape = locate(info, piece, rows)
        nbytes = prod(shape) * dtype.itemsize
        place = memory.take(direct.spanned(first, first + nbytes)) if memory else None
        data = self._read(info.file, first, nbytes, place)
        if len(data) < nbytes:
            raise self._cut_short(piece.name, first + len(data))
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()
        return data.view(dtype).reshape(shape)

    def sample(self, name: str) -> bytes:
        """Up to SAMPLE bytes from the middle of a tensor."""
        info = self.tensors[name]
        size = min(SAMPLE, info.nbytes)
        first = info.offset + (info.nbytes - size) // 2
        data = self._read(info.file, first, size)
        if len(data) < size:
            raise self._cut_short(name, first + len(data))
        return data.tobytes()

    def _cut_short(self, name: str, end: int) -> InputError:
        info = self.tensors[name]
        return InputError(
            "a file became shorter while it was read",
            file=info.file,
            tensor=name,
            found=f"its end at byte {end}",
            expected=f"{info.nbytes} bytes from byte {info.offset}",
            remedy="let nothing else write to the checkpoint, then run again",
        )

    def _read(self, file: Path, first: int, nbytes: int, memory: direct.Bytes | None = None) -> direct.Bytes:
        """Bytes of a file; what goes wrong names it."""
        try:
            return direct.read(self._descriptor(file), first, nbytes, memory)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = direct.open_direct(file, os.O_RDONLY)
                self._files.callback(os.close, self._descriptors[file])
            return self._descriptors[file]

    def _read_headers(self) -> tuple[dict[str, TensorInfo], list[str]]:
        single = self.folder / SINGLE_FILE
        if not self.index.is_file():
            if not single.is_file():
                raise InputError(
                    "the checkpoint has no weights",
                    file=self.folder,
                    found=f"neither {INDEX_FILE} nor {SINGLE_FILE}",
                    expected="one of them",
                    remedy="finish the download",
                )
            return read_header(single), self._stray([SINGLE_FILE])
        weight_map = self._read_index()
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if not (self.folder / file).is_file()]
        if absent:
            raise InputError(
                "the index names files that are not there",
                file=self.index,
                found=f"{len(files) - len(absent)} of {len(files)} files; absent: {', '.join(absent)}",
                expected="every file it names",
                remedy="finish the download",
            )
        listed: dict[str, TensorInfo] = {}
        unlisted = self._stray(files)
        for file in files:
            for name, info in read_header(self.folder / file).items():
                if weight_map.get(name) == file:
                    listed[name] = info
                else:
                    unlisted.append(f"{name} ({file})")
        for name, file in weight_map.items():
            if name not in listed:
                raise InputError(
                    "the index lists a tensor that its file does not hold",
                    file=self.folder / file,
                    tensor=name,
                    found="no such tensor in the header",
                    expected=f"the tensor, by {INDEX_FILE}",
                    remedy="download this file and the index again",
                )
        return listed, unlisted

    def _stray(self, files: list[str]) -> list[str]:
        return [file.name for file in sorted(self.folder.glob("*.safetensors")) if file.name not in files]

    def _read_index(self) -> dict[str, str]:
        weight_map = read_json(self.index).get("weight_map")
        entries = weight_map.items() if isinstance(weight_map, dict) else ()
        wrong = [f"{name}: {file!r}" for name, file in entries if not plain_name(file)]
        if not entries or wrong:
            raise InputError(
                "the index has no usable weight_map",
                file=self.index,
                found=wrong[0][:500] if wrong else f"{weight_map!r:.80}",
                expected="tensor names, each with the name of a file in this directory",
                remedy="download the index again",
            )
        return dict(entries)


def locate(info: TensorInfo, piece: Piece, rows: Rows | None = None) -> tuple[int, tuple[int, ...]]:
    """Where a piece of a tensor (or some of the piece's rows) begins in its file, and its shape; it has no gaps."""
    shape, first, width = info.shape, info.offset, WIDTH[info.dtype]
    if piece.index is not None:
        shape = shape[1:]
        first += piece.index * prod(shape) * width
    for begin, end in (span for span in (piece.rows, rows) if span):
        first += begin * prod(shape[1:]) * width
        shape = (end - begin, *shape[1:])
    return first, shape


def is_block_fp8(config: dict[str, Any]) -> bool:
    """Whether a config.json says that its weights are E4M3 with a scale for every block of our size."""
    quantization = config.get("quantization_config")
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "fp8"
        and quantization.get("weight_block_size") == [BLOCK, BLOCK]
        and quantization.get("fmt", "e4m3") == "e4m3"
    )


def check_quantization_config(checkpoint: Checkpoint) -> None:
    """An already quantised source must be block FP8 with our block size: InputError, since else it would be misread."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None or is_block_fp8(checkpoint.config):
        return
    expected = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
    found = quantization if isinstance(quantization, dict) else {}
    raise InputError(
        "the checkpoint is quantised in a way Mosaic does not read",
        file=checkpoint.folder / CONFIG_FILE,
        found={key: found.get(key) for key in expected},
        expected=expected,
        remedy="use the BF16 checkpoint or the official block-FP8 release",
    )


def _codes_in_bytes(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """U8 with scales beside it is F8_E4M3, as written by tools whose arrays have no such type (numpy's)."""
    return {
        name: replace(info, dtype="F8_E4M3") if info.dtype == "U8" and scale_name(name) in tensors else info
        for name, info in tensors.items()
    }


def plain_name(value: object) -> bool:
    """Whether a value names a file in the directory at hand and nowhere else."""
    return isinstance(value, str) and 0 < len(value) < 256 and value == Path(value).name and value != ".."
