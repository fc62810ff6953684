"""A recorded routing trace: which experts the router chose, for every token and every layer that has experts.

What replays and profiles are made from. Not a log of the cache: whether an expert was in memory is not in it.

File, version 1: one line of JSON (ASCII, ended by a line feed), then the choices.

    {"mosaic_trace": 1, "model": "...", "layers": [0, 1, ...], "num_experts": 256, "top_k": 8, "expert_nbytes": 3146112}

* `layers`: the decoder layers that have experts, ascending. `expert_nbytes`: the bytes that a missing expert costs.
* The choices: uint16, little-endian, [tokens, layers, top_k], expert numbers in the router's order. The file has no
  count of tokens, so it can grow; of a token that was cut off at the end nothing is used.
"""

import errno
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mosaic.format.errors import InputError
from mosaic.format.index import MOST
from mosaic.format.jsonfile import unique_keys

VERSION = 1
EXPERT = np.dtype("<u2")
MOST_NBYTES = 1 << 40  # of an expert
MOST_HEADER = 1 << 20  # bytes


@dataclass(frozen=True)
class TraceHeader:
    """What the choices are of. ValueError if it describes no model."""

    model: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_nbytes: int

    def __post_init__(self) -> None:
        numbers = (*self.layers, self.num_experts, self.top_k, self.expert_nbytes)
        if type(self.model) is not str or any(type(number) is not int for number in numbers):
            raise ValueError("a value is of the wrong type")
        if not self.model.isprintable():
            raise ValueError("the model's name is not printable")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError("the layers do not ascend")
        if not 0 <= self.layers[0] <= self.layers[-1] <= MOST or not 0 < self.top_k <= self.num_experts <= MOST:
            raise ValueError("layers, num_experts or top_k is out of range")
        if not 0 < self.expert_nbytes <= MOST_NBYTES:
            raise ValueError("expert_nbytes is out of range")

    @property
    def token_shape(self) -> tuple[int, int]:
        """Choices of one token: [layers, top_k]."""
        return len(self.layers), self.top_k

    def to_bytes(self) -> bytes:
        """The first line of the file."""
        return json.dumps({"mosaic_trace": VERSION, **asdict(self)}).encode("ascii") + b"\n"

    @classmethod
    def from_bytes(cls, line: bytes) -> "TraceHeader":
        """The inverse of `to_bytes`; ValueError for anything else."""
        value = json.loads(line, object_pairs_hook=unique_keys)
        keys = ["mosaic_trace", *cls.__dataclass_fields__]
        if not isinstance(value, dict) or set(value) != set(keys):
            raise ValueError(f"not an object with the keys {', '.join(keys)}")
        version = value.pop("mosaic_trace")
        if type(version) is not int or version != VERSION:
            raise ValueError(f"version {version}")
        if not isinstance(value["layers"], list):
            raise ValueError("layers are not a list")
        return cls(**{**value, "layers": tuple(value["layers"])})


@dataclass(frozen=True, eq=False)
class Trace:
    """Choices [tokens, layers, top_k]; `dropped` bytes at the end of the file were not a whole token."""

    header: TraceHeader
    experts: NDArray[np.uint16]
    dropped: int = 0

    def keys(self) -> NDArray[np.int64]:
        """Keys of the experts, [tokens, layers, top_k]: layer * num_experts + expert."""
        layers = np.array(self.header.layers, np.int64)[:, None]
        return layers * self.header.num_experts + self.experts


def read_trace(file: Path) -> Trace:
    """A trace from a file; InputError if it is none."""
    try:
        with file.open("rb") as stream:
            header = _read_header(stream, file)
            data = stream.read()
    except OSError as error:
        raise _refused("cannot read a trace", file, error.strerror) from error
    size = math.prod(header.token_shape)
    tokens, dropped = divmod(len(data), size * EXPERT.itemsize)
    experts = np.frombuffer(data, EXPERT, tokens * size).reshape(tokens, *header.token_shape)
    ordered = np.sort(experts)
    wrong = np.argwhere((ordered[..., -1] >= header.num_experts) | (ordered[..., 1:] == ordered[..., :-1]).any(-1))
    if len(wrong):
        token, row = wrong[0].tolist()
        found = f"token {token}, layer {header.layers[row]}: {experts[token, row].tolist()}"
        raise _refused("choices that no router of this model makes", file, found)
    return Trace(header, experts, dropped)


class TraceWriter:
    """Writes a trace, or continues that of an earlier run. InputError if the file is something else."""

    def __init__(self, file: Path, header: TraceHeader) -> None:
        self._file = file
        self._header = header
        self._pending: list[NDArray[Any]] = []  # of the layers so far, [T, top_k]
        try:
            self._stream = file.open("ab+", buffering=0)
        except OSError as error:
            raise _refused("cannot write a trace", file, error.strerror) from error
        try:
            self._continue(file)
        except OSError as error:
            self._stream.close()
            raise _refused("cannot write a trace", file, error.strerror) from error
        except InputError:
            self._stream.close()
            raise

    def _continue(self, file: Path) -> None:
        """Write the header; or check the one that is there, and cut off what is not a whole token."""
        stream = self._stream
        end = stream.tell()
        if not end:
            self._write(self._header.to_bytes())
            return
        stream.seek(0)
        found = _read_header(stream, file)
        if found != self._header:
            raise InputError(
                "a trace of another model", file=file, found=found, expected=self._header, remedy="choose another file"
            )
        token = math.prod(self._header.token_shape) * EXPERT.itemsize
        stream.truncate(end - (end - stream.tell()) % token)

    def record(self, layer: int, experts: ArrayLike) -> None:
        """Take the choices [T, top_k] of a layer for the same T tokens in every layer, layers ascending.

        They are written when the last layer is there. The first layer begins anew: what an interrupted pass left is
        dropped. ValueError for another layer or shape than is due.
        """
        if layer == self._header.layers[0]:
            self._pending.clear()
        choices = np.asarray(experts)
        shape = self._pending[0].shape if self._pending else (len(choices), self._header.top_k)
        due = self._header.layers[len(self._pending)]
        if layer != due or choices.shape != shape:
            raise ValueError(f"layer {layer}, {choices.shape}, where layer {due}, {shape} is due")
        self._pending.append(choices.astype(EXPERT))
        if len(self._pending) == len(self._header.layers):
            data = np.stack(self._pending, axis=1).tobytes()
            self._pending.clear()
            try:
                self._write(data)
            except OSError as error:
                raise _refused("cannot write a trace", self._file, error.strerror) from error

    def _write(self, data: bytes) -> None:
        """At once and whole: nothing waits in a buffer for a disk that is full."""
        if self._stream.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(stream: BinaryIO, file: Path) -> TraceHeader:
    line = stream.readline(MOST_HEADER)
    if not line.endswith(b"\n"):
        raise _refused("not a routing trace", file, f"no line of JSON within {MOST_HEADER:,} bytes")
    try:
        return TraceHeader.from_bytes(line)
    except (ValueError, RecursionError) as error:
        raise _refused("not a routing trace", file, error) from error


def _refused(problem: str, file: Path, found: object) -> InputError:
    expected = f"a routing trace of version {VERSION}"
    return InputError(problem, file=file, found=found, expected=expected, remedy="record it again with mosaic-run")
