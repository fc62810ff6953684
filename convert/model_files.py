"""A finished model directory as `verify` sees it: every part read when first asked for, every byte of a shard once."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mosaic.format import architectures, e4m3, index, layout
from mosaic.format.catalog import Catalog, read_catalog
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import Entry, ShardLayout, Stored
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.source import NUMPY
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import Role, TensorSpec

CHUNK = 1 << 22

ExpertKey = tuple[int, int]  # layer, expert


@dataclass
class Scan:
    """What one pass over a shard found."""

    nbytes: int = 0
    sha256: str = ""
    nan_codes: dict[str, int] = field(default_factory=dict)  # by tensor, where there are any
    crc32c: dict[ExpertKey, int] = field(default_factory=dict)  # of spans, continued over scales


class ModelFiles:
    """The files of a model directory. `progress` is told of the bytes that were read."""

    def __init__(self, folder: Path, progress: Callable[[int], object]) -> None:
        self.folder = folder
        self._progress = progress

    @cached_property
    def catalog(self) -> Catalog:
        """mosaic.json."""
        return read_catalog(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_json(self.folder / layout.CONFIG_FILE)

    @cached_property
    def architecture(self) -> architectures.Architecture:
        """The architecture of config.json."""
        return architectures.find(self.config, self.folder / layout.CONFIG_FILE)

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec config.json gives; the catalog's is held against it."""
        return self.architecture.parse(self.config, self.folder / layout.CONFIG_FILE)

    @cached_property
    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        """{shard: {tensor: its place}}."""
        shards = sorted(name for name in self.catalog.files if name.endswith(layout.SHARD_SUFFIX))
        return {name: read_header(self.folder / name) for name in shards}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of every shard."""
        return {name: info for header in self.headers.values() for name, info in header.items()}

    @cached_property
    def contract(self) -> list[TensorSpec]:
        """What config.json calls for."""
        return self.architecture.tensors(self.spec, self.config, self.tensors.keys())

    @cached_property
    def stored(self) -> list[Stored]:
        """The contract with the dtypes that were found. Needs every tensor of it."""

        def entry(name: str) -> Entry:
            return Entry(name, self.tensors[name].dtype, self.tensors[name].shape)

        return [
            Stored(spec, entry(spec.name), entry(spec.scale_name) if spec.scale_name in self.tensors else None)
            for spec in self.contract
        ]

    @cached_property
    def layouts(self) -> dict[str, ShardLayout]:
        """The layout every shard should have."""
        groups: dict[str, list[Stored]] = {}
        for stored in self.stored:
            groups.setdefault(layout.file_of(stored.spec, len(self.spec.layers)), []).append(stored)
        return {file: layout.shard_layout(file, group) for file, group in groups.items()}

    @cached_property
    def experts(self) -> dict[ExpertKey, list[Stored]]:
        """gate, up and down of every routed expert of the decoder layers."""
        groups: dict[ExpertKey, list[Stored]] = {}
        for stored in self.stored:
            spec = stored.spec
            if spec.role is Role.ROUTED_EXPERTS and spec.layer is not None and spec.expert is not None:
                groups.setdefault((spec.layer, spec.expert), []).append(stored)
        return groups

    @cached_property
    def scans(self) -> dict[str, Scan]:
        """One pass over every shard. Needs sound headers."""
        owners = {
            name: (spec.layer, spec.expert)
            for spec in self.contract
            if spec.layer is not None and spec.expert is not None
            for name in (spec.name, spec.scale_name)
        }
        return {file: self._scan(file, owners) for file in self.headers}

    def scales(self, name: str) -> np.ndarray[Any, Any]:
        """The values of a tensor of scales."""
        info = self.tensors[name]
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            return np.frombuffer(stream.read(info.nbytes), NUMPY[info.dtype]).reshape(info.shape)

    def digest(self, file: str) -> tuple[int, str]:
        """Size and sha256 of a file."""
        digest, size = hashlib.sha256(), 0
        with (self.folder / file).open("rb") as stream:
            for data in self._chunks(stream.read, None):
                digest.update(data)
                size += len(data)
        return size, digest.hexdigest()

    def _scan(self, file: str, owners: dict[str, ExpertKey]) -> Scan:
        scan, digest = Scan(), hashlib.sha256()
        tensors = sorted(self.headers[file].items(), key=lambda item: item[1].offset)
        start = min((info.offset for _, info in tensors), default=None)
        with (self.folder / file).open("rb") as stream:
            for data in self._chunks(stream.read, start):
                digest.update(data)
                scan.nbytes += len(data)
            for name, info in tensors:
                for data in self._chunks(stream.read, info.nbytes):
                    digest.update(data)
                    scan.nbytes += len(data)
                    if info.dtype == "F8_E4M3" and (bad := e4m3.is_nan(np.frombuffer(data, np.uint8)).sum()):
                        scan.nan_codes[name] = scan.nan_codes.get(name, 0) + int(bad)
                    if owner := owners.get(name):
                        scan.crc32c[owner] = index.crc32c(data, scan.crc32c.get(owner, 0))
        scan.sha256 = digest.hexdigest()
        return scan

    def _chunks(self, read: Callable[[int], bytes], nbytes: int | None) -> Iterator[bytes]:
        """The next `nbytes` bytes, or all there are."""
        left = nbytes
        while data := read(CHUNK if left is None else min(CHUNK, left)):
            yield data
            self._progress(len(data))
            left = None if left is None else left - len(data)
