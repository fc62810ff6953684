"""A finished model directory as `verify` sees it: every part read when first asked for, every byte of a shard once."""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mosaic.convert.quantize import count_codes
from mosaic.convert.reader import ahead
from mosaic.convert.sums import CodeUse
from mosaic.format import architectures, direct, index, layout
from mosaic.format.catalog import Catalog, read_catalog
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import Entry, ShardLayout, Stored
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.source import NUMPY
from mosaic.format.spec import ModelSpec
from mosaic.format.tensors import Role, TensorSpec

CHUNK = 4 << 20
MOST_THREADS = 8
READ_AHEAD = 3  # chunks of a shard that are being read, wait, or are looked at

ExpertKey = tuple[int, int]  # layer, expert


@dataclass
class Scan:
    """What one pass over a shard found."""

    nbytes: int = 0
    sha256: str = ""
    codes: dict[str, NDArray[np.uint64]] = field(default_factory=dict)  # by E4M3 tensor: counts of the 256 codes
    crc32c: dict[ExpertKey, int] = field(default_factory=dict)  # of spans, continued over scales


class ModelFiles:
    """The files of a model directory. `progress` is told of the bytes that were read."""

    def __init__(self, folder: Path, progress: Callable[[int], object]) -> None:
        self.folder = folder
        self._progress = progress
        self._counting = threading.Lock()
        self._stopping = threading.Event()

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
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
            try:
                found = pool.map(lambda file: self._scan(file, owners), self.headers)
                return dict(zip(self.headers, found, strict=True))
            except BaseException:  # Ctrl-C too: the others stop at their next chunk
                self._stopping.set()
                raise

    @cached_property
    def use(self) -> list[tuple[Stored, CodeUse]]:
        """How codes and scales (those above 0) of every E4M3 tensor are used."""
        codes = {name: counts for scan in self.scans.values() for name, counts in scan.codes.items()}
        uses = [(stored, CodeUse()) for stored in self.stored if stored.weight.name in codes and stored.scale]
        for stored, use in uses:
            assert stored.scale
            use.codes += codes[stored.weight.name]
            scales = self.scales(stored.scale.name)
            if (sound := scales[np.nan_to_num(scales.astype(np.float32)) > 0]).size:
                use.add_scales(sound)
        return uses

    def scales(self, name: str) -> np.ndarray[Any, Any]:
        """The values of a tensor of scales."""
        info = self.tensors[name]
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            return np.frombuffer(stream.read(info.nbytes), NUMPY[info.dtype]).reshape(info.shape)

    def digest(self, file: str) -> tuple[int, str]:
        """Size and sha256 of a file."""
        digest, size = hashlib.sha256(), 0
        for _, data in self._chunks(self.folder / file):
            digest.update(data.data)
            size += len(data)
        return size, digest.hexdigest()

    def _scan(self, file: str, owners: dict[str, ExpertKey]) -> Scan:
        scan, digest = Scan(), hashlib.sha256()
        tensors = deque(sorted(self.headers[file].items(), key=lambda item: item[1].offset))
        for position, data in self._chunks(self.folder / file):
            digest.update(data.data)
            scan.nbytes += len(data)
            while tensors and tensors[0][1].offset < position + len(data):
                name, info = tensors[0]
                begin, end = info.offset - position, info.offset + info.nbytes - position
                part = data[max(begin, 0) : end]
                if info.dtype == "F8_E4M3":
                    scan.codes[name] = scan.codes.get(name, 0) + count_codes(part)
                if owner := owners.get(name):
                    scan.crc32c[owner] = index.crc32c(part.data, scan.crc32c.get(owner, 0))
                if end > len(data):
                    break
                tensors.popleft()
        scan.sha256 = digest.hexdigest()
        return scan

    def _chunks(self, file: Path) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """All bytes of a file in pieces, each with its position."""
        descriptor = direct.open_direct(file, os.O_RDONLY)
        try:
            positions = range(0, os.fstat(descriptor).st_size, CHUNK)
            with ThreadPoolExecutor(1) as reader:
                memory = [direct.aligned(CHUNK) for _ in range(READ_AHEAD)]
                jobs = (
                    partial(direct.read, descriptor, position, CHUNK, memory[number % READ_AHEAD])
                    for number, position in enumerate(positions)
                )
                for position, data in zip(positions, ahead(jobs, reader, READ_AHEAD), strict=True):
                    if self._stopping.is_set():
                        return
                    yield position, data
                    with self._counting:
                        self._progress(len(data))
        finally:
            os.close(descriptor)
