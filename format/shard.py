"""Reads the headers of safetensors files. The `safetensors` library is the oracle in tests.

The library cannot tell what is wrong with a damaged file, so this is ours: a header is hostile until checked, every
length, offset, dtype and shape. Writing is `shard_writer`'s.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.index import Span
from mosaic.format.jsonfile import unique_keys

MAX_HEADER = 100_000_000  # the library's own limit
_REMEDY = "the file is damaged or incomplete: download or convert it again"

#: Bytes per element of every safetensors dtype with whole bytes.
_WIDTH = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors file; `offset` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def span(self) -> Span:
        """Its place."""
        return Span(self.dtype, self.offset, self.nbytes)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, from its header alone; InputError for every way it can lie."""
    return read_with_metadata(file)[0]


def read_with_metadata(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Every tensor of a safetensors file in the order of its header, and its metadata; errors as in `read_header`."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise _damaged(file, None, "something that is no file", "a regular file")
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise _damaged(file, None, f"{size} bytes with a header of {length}", "a header that fits the file")
            raw = stream.read(length)
    except OSError as error:
        raise InputError(
            "cannot read a safetensors file", file=file, found=error.strerror, remedy="check the path and its rights"
        ) from error
    table, metadata = _parse_header(file, raw)
    return _check(file, table, 8 + length, size), metadata


def runs(infos: Iterable[TensorInfo]) -> Iterator[tuple[Path, int, int]]:
    """Where tensors lie: (file, first byte, end) for those that follow each other without a gap."""
    run: tuple[Path, int, int] | None = None
    for info in sorted(infos, key=lambda info: (info.file, info.offset)):
        if run and run[0] == info.file and info.offset <= run[2]:
            run = run[0], run[1], max(run[2], info.offset + info.nbytes)
            continue
        if run:
            yield run
        run = info.file, info.offset, info.offset + info.nbytes
    if run:
        yield run


def _parse_header(file: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The header as the safetensors library accepts it: UTF-8, every key once, `__metadata__` of strings."""
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys, parse_int=_whole)
        if not isinstance(table, dict):
            raise ValueError("no JSON object")
        metadata = table.pop("__metadata__", None)
        if metadata is not None and not _strings(metadata):
            raise ValueError("__metadata__ that is no object of strings")
        "".join(table).encode("utf-8")  # no lone surrogates in names
    except (ValueError, RecursionError) as error:
        raise _damaged(
            file, None, f"a header that is not JSON as the library reads it: {error}", "a safetensors header"
        ) from error
    return table, metadata or {}


def _whole(digits: str) -> int:
    if digits == "-0":
        raise ValueError("the number -0")
    return int(digits)


def _strings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())


def _check(file: Path, table: dict[str, Any], start: int, size: int) -> dict[str, TensorInfo]:
    tensors = {name: _tensor(file, name, value, start) for name, value in table.items()}
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise _damaged(file, name, f"data at byte {tensor.offset}", f"at byte {position}, without gap or overlap")
        position += tensor.nbytes
    if position != size:
        raise _damaged(file, None, f"{size} bytes", f"{position} bytes by its header")
    return tensors


def _tensor(file: Path, name: str, value: Any, start: int) -> TensorInfo:
    def whole_numbers(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, name, f"{value!r:.80}", "an object with dtype, shape and data_offsets")
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTH:
        raise InputError(
            "a tensor has a dtype Mosaic does not know",
            file=file,
            tensor=name,
            found=dtype,
            expected=", ".join(_WIDTH),
            remedy="use a checkpoint in BF16, F16, F32 or block FP8",
        )
    if not whole_numbers(shape) or not whole_numbers(span) or len(span) != 2 or span[0] > span[1]:
        raise _damaged(file, name, f"shape {shape}, data_offsets {span}", "whole numbers, begin before end")
    if any(prod(shape[: count + 1]) >= 2**63 for count in range(len(shape))):
        raise _damaged(file, name, f"shape {shape}", "a number of elements below 2^63")
    if prod(shape) * _WIDTH[dtype] != span[1] - span[0]:
        raise _damaged(file, name, f"{span[1] - span[0]} bytes", f"{prod(shape) * _WIDTH[dtype]} ({dtype} {shape})")
    return TensorInfo(file, dtype, tuple(shape), start + span[0], span[1] - span[0])


def _damaged(file: Path, tensor: str | None, found: str, expected: str) -> InputError:
    return InputError("not a sound safetensors file", file=file, tensor=tensor, found=found, expected=expected,
                      remedy=_REMEDY)  # fmt: skip
