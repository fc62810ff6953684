"""Checks every numbered invariant of docs/FORMAT.md on a finished model directory. Reads each byte once."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mosaic.convert.report import REPORT_FILE, REPORT_VERSION, contract_entry, entry_flaw
from mosaic.format import architectures, e4m3, index, layout
from mosaic.format.catalog import Catalog, read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import Entry, ShardLayout, Stored
from mosaic.format.shard import TensorInfo, read_header
from mosaic.format.source import NUMPY
from mosaic.format.tensors import QUANTIZABLE, Role, TensorSpec

CHUNK = 1 << 22
MOST = 5  # failures of one invariant that are shown


@dataclass
class Result:
    """What became of one invariant."""

    invariant: str
    title: str
    failures: list[str] = field(default_factory=list)
    checked: bool = True

    @property
    def holds(self) -> bool:
        """Checked and found true."""
        return self.checked and not self.failures


def verify(folder: Path, progress: Callable[[int], object] = lambda _: None) -> list[Result]:
    """Check every invariant; InputError if the directory is not a Mosaic model directory at all.

    Invariants that cannot be judged because the files are damaged beyond reading are reported as not checked.
    """
    if not (folder / "mosaic.json").is_file():
        read_catalog(folder)
    model = _Model(folder, progress)
    results: list[Result] = []
    for check in _CHECKS:
        name, title = (check.__doc__ or "").split(" ", 1)
        result = Result(name, title.rstrip("."))
        results.append(result)
        if any(done.failures and done.invariant in ("V1", "V4", "V6") for done in results):
            result.checked = False
            continue
        try:
            failures = iter(check(model))
            result.failures = [failure for failure, _ in zip(failures, range(MOST), strict=False)]
        except InputError as error:
            result.failures = [str(error)]
    return results


class _Model:
    """A model directory as the checks see it; parts are read when first asked for."""

    def __init__(self, folder: Path, progress: Callable[[int], object]) -> None:
        self.folder = folder
        self.progress = progress

    @cached_property
    def catalog(self) -> Catalog:
        return read_catalog(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.folder / layout.CONFIG_FILE)

    @cached_property
    def architecture(self) -> architectures.Architecture:
        return architectures.find(self.config, self.folder / layout.CONFIG_FILE)

    @cached_property
    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        shards = sorted(name for name in self.catalog.files if name.endswith(".safetensors"))
        return {name: read_header(self.folder / name) for name in shards}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for header in self.headers.values() for name, info in header.items()}

    @cached_property
    def contract(self) -> list[TensorSpec]:
        return self.architecture.tensors(self.catalog.spec, self.config, self.tensors.keys())

    @cached_property
    def stored(self) -> list[Stored]:
        def entry(name: str) -> Entry:
            return Entry(name, self.tensors[name].dtype, self.tensors[name].shape)

        return [
            Stored(spec, entry(spec.name), entry(spec.scale_name) if spec.scale_name in self.tensors else None)
            for spec in self.contract
        ]

    @cached_property
    def layouts(self) -> dict[str, ShardLayout]:
        groups: dict[str, list[Stored]] = {}
        for stored in self.stored:
            groups.setdefault(layout.file_of(stored.spec, len(self.catalog.spec.layers)), []).append(stored)
        return {file: layout.shard_layout(file, group) for file, group in groups.items()}

    @cached_property
    def experts(self) -> dict[tuple[int, int], list[Stored]]:
        groups: dict[tuple[int, int], list[Stored]] = {}
        for stored in self.stored:
            spec = stored.spec
            if spec.role is Role.ROUTED_EXPERTS and spec.layer is not None and spec.expert is not None:
                groups.setdefault((spec.layer, spec.expert), []).append(stored)
        return groups

    def values(self, name: str) -> np.ndarray[Any, Any]:
        info = self.tensors[name]
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            return np.frombuffer(stream.read(info.nbytes), NUMPY[info.dtype]).reshape(info.shape)


def _catalog(model: _Model) -> Iterator[str]:
    """V1 The catalog has the known version, exactly the known keys and a spec that parses."""
    if not model.catalog.files:
        yield "the catalog names no files"


def _files(model: _Model) -> Iterator[str]:
    """V2 Every file of the catalog is there with its size and sha256, and no other shard."""
    for name, record in model.catalog.files.items():
        file = model.folder / name
        if not file.is_file():
            yield f"{name}: absent"
            continue
        digest, size = hashlib.sha256(), 0
        with file.open("rb") as stream:
            while data := stream.read(CHUNK):
                digest.update(data)
                size += len(data)
                model.progress(len(data))
        if (size, digest.hexdigest()) != (record.nbytes, record.sha256):
            yield f"{name}: {size} bytes, sha256 {digest.hexdigest()}; expected {record.nbytes}, {record.sha256}"
    for file in sorted(model.folder.glob("*.safetensors")):
        if file.name not in model.catalog.files:
            yield f"{file.name}: not in the catalog"


def _sound(model: _Model) -> Iterator[str]:
    """V4 Every shard is a sound safetensors file."""
    if not model.headers:
        yield "no shards"


def _spec(model: _Model) -> Iterator[str]:
    """V3 The catalog's spec is the one config.json gives."""
    spec = model.architecture.parse(model.config, model.folder / layout.CONFIG_FILE)
    if spec != model.catalog.spec:
        yield f"{spec} by config.json; the catalog has {model.catalog.spec}"


def _page(model: _Model) -> Iterator[str]:
    """V5 The data of every shard starts on a page."""
    for name in model.headers:
        with (model.folder / name).open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        if start % layout.PAGE:
            yield f"{name}: data starts at byte {start}"


def _complete(model: _Model) -> Iterator[str]:
    """V6 Shards, index and contract hold the same tensors, once each, as they should be."""
    value = read_json(model.folder / layout.INDEX_FILE)
    listed, metadata = value.get("weight_map"), value.get("metadata")
    held = [(name, file) for file, header in model.headers.items() for name in header]
    if not isinstance(listed, dict) or not isinstance(metadata, dict):
        yield f"index: weight_map is {listed!r:.60}, metadata {metadata!r:.60}"
        return
    if dict(held) != listed:
        differing = [name for name in listed.keys() | dict(held).keys() if listed.get(name) != dict(held).get(name)]
        yield f"index and shards differ: {sorted(differing)[:3]}"
    if len(model.tensors) != len(held):
        yield "a tensor stands in two shards"
    total = sum(info.nbytes for info in model.tensors.values())
    if type(metadata.get("total_size")) is not int or metadata["total_size"] != total:
        yield f"total_size {metadata.get('total_size')!r}; the tensors have {total} bytes"
    expected = {spec.name: spec for spec in model.contract}
    scales = {spec.scale_name: spec for spec in model.contract}
    if unknown := [name for name in model.tensors if name not in expected and name not in scales]:
        yield f"tensors outside the contract: {unknown[:3]}"
    yield from (f"{name}: absent" for name in expected if name not in model.tensors)
    for name, info in model.tensors.items():
        spec = expected.get(name) or scales.get(name)
        if spec is None:
            continue
        file = layout.file_of(spec, len(model.catalog.spec.layers))
        shape = spec.shape if name in expected else info.shape  # the shape of scales: V9
        if (info.shape, info.file.name) != (shape, file):
            yield f"{name}: {info.shape} in {info.file.name}; expected {shape} in {file}"
        if info.dtype not in layout.WIDTH:
            yield f"{name}: {info.dtype}; expected {', '.join(layout.WIDTH)}"


def _order(model: _Model) -> Iterator[str]:
    """V7 The tensors of every shard stand in the order of the format."""
    for file, expected in model.layouts.items():
        found = sorted(model.headers[file], key=lambda name: model.tensors[name].offset)
        wrong = (pair for pair in zip(found, expected.entries, strict=True) if pair[0] != pair[1].name)
        if first := next(wrong, None):
            yield f"{file}: {first[0]} where {first[1].name} should stand"


def _aligned(model: _Model) -> Iterator[str]:
    """V8 Every expert span of whole blocks starts on a multiple of 4096."""
    for members in model.experts.values():
        offset = model.tensors[members[0].weight.name].offset
        if all(e4m3.whole_blocks(member.spec.shape) for member in members) and offset % layout.PAGE:
            yield f"{members[0].weight.name}: at byte {offset}"


def _scales(model: _Model) -> Iterator[str]:
    """V9 Every E4M3 tensor is whole blocks with scales of its grid, one scale dtype per shard; nothing else has any."""
    dtypes: dict[str, set[str]] = {}
    for stored in model.stored:
        name, quantized = stored.weight.name, stored.weight.dtype == "F8_E4M3"
        if quantized != (stored.scale is not None):
            yield f"{name}: {stored.weight.dtype} {'with' if stored.scale else 'without'} scales"
        elif quantized and not e4m3.whole_blocks(stored.spec.shape):
            yield f"{name}: E4M3 of shape {stored.spec.shape}"
        elif stored.scale:
            dtypes.setdefault(model.tensors[name].file.name, set()).add(stored.scale.dtype)
            if stored.scale.shape != e4m3.grid(stored.spec.shape):
                yield f"{stored.scale.name}: {stored.scale.shape}; expected {e4m3.grid(stored.spec.shape)}"
    yield from (f"{file}: scales in {found}" for file, found in dtypes.items() if found not in ({"BF16"}, {"F32"}))


def _codes(model: _Model) -> Iterator[str]:
    """V10 No code is NaN."""
    for stored in model.stored:
        if stored.weight.dtype == "F8_E4M3":
            bad = (model.values(stored.weight.name) & 0x7F) == e4m3.NAN_CODES[0]
            if bad.any():
                yield f"{stored.weight.name}: {np.count_nonzero(bad)} NaN codes"


def _finite_scales(model: _Model) -> Iterator[str]:
    """V11 Every scale is finite and above 0."""
    for stored in model.stored:
        if stored.scale:
            scales = model.values(stored.scale.name).astype(np.float32)
            if not (np.isfinite(scales) & (scales > 0)).all():
                yield f"{stored.scale.name}: from {scales.min()} to {scales.max()}"


def _alike(model: _Model) -> Iterator[str]:
    """V12 Experts of a layer have one dtype; linears that engines merge are E4M3 together or not at all."""
    groups: dict[tuple[str, bool], set[str]] = {}
    for stored in model.stored:
        spec, dtype = stored.spec, stored.weight.dtype
        if dtype == "F8_E4M3" and spec.role not in QUANTIZABLE:
            yield f"{spec.name}: E4M3 for role {spec.role}"
        if spec.fusion:
            groups.setdefault((spec.fusion, spec.role is Role.ROUTED_EXPERTS), set()).add(dtype)
    for (group, experts), dtypes in groups.items():
        if len(dtypes) > 1 and (experts or "F8_E4M3" in dtypes):
            yield f"{group}: {sorted(dtypes)}"


def _config(model: _Model) -> Iterator[str]:
    """V13 config.json describes the quantization exactly."""
    found = model.config.get("quantization_config")
    unquantized = [stored.spec for stored in model.stored if stored.scale is None]
    expected = architectures.quantization_config(model.architecture, unquantized)
    if found != (expected if len(unquantized) < len(model.stored) else None):
        yield f"quantization_config is {found!r:.200}"


def _index_rows(model: _Model) -> Iterator[str]:
    """V14 experts.npy has one row per routed expert and agrees with the headers."""
    rows = index.read_index(model.folder / index.EXPERTS_FILE)
    expected = [_expected_row(model, key, members) for key, members in sorted(model.experts.items())]
    if len(rows) != len(expected):
        yield f"{len(rows)} rows; expected {len(expected)}"
    for row, wanted in zip(rows, expected, strict=False):
        if row.tolist()[:-1] != wanted:
            yield f"layer {row['layer']} expert {row['expert']}: {row.tolist()[:-1]}; expected {wanted}"


def _expected_row(model: _Model, key: tuple[int, int], members: list[Stored]) -> tuple[Any, ...]:
    weights = [model.tensors[member.weight.name] for member in members]
    scales = [model.tensors[member.scale.name] for member in members if member.scale]
    return (*key, *index.place(weights, scales))


def _checksums(model: _Model) -> Iterator[str]:
    """V15 Every CRC of experts.npy agrees with the bytes."""
    for row in index.read_index(model.folder / index.EXPERTS_FILE):
        key = (int(row["layer"]), int(row["expert"]))
        if key not in model.experts or row.tolist()[:-1] != _expected_row(model, key, model.experts[key]):
            continue  # V14 has said so; its offsets lead nowhere
        with (model.folder / row["shard"].decode()).open("rb") as stream:
            span = int(row["gate_nbytes"] + row["up_nbytes"] + row["down_nbytes"])
            crc = index.crc32c(os.pread(stream.fileno(), span, int(row["offset"])))
            crc = index.crc32c(os.pread(stream.fileno(), int(row["scale_nbytes"]), int(row["scale_offset"])), crc)
        if crc != row["crc32c"]:
            yield f"layer {key[0]} expert {key[1]}: CRC {crc:08x}; the index has {row['crc32c']:08x}"


def _report(model: _Model) -> Iterator[str]:
    """V16 report.json has one true entry per weight."""
    report = read_json(model.folder / REPORT_FILE)
    entries = report.get("tensors")
    if report.get("version") != REPORT_VERSION or not isinstance(entries, list):
        yield f"version {report.get('version')!r} with tensors {entries!r:.60}; expected {REPORT_VERSION} and a list"
        return
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    if names != [stored.weight.name for stored in model.stored]:
        yield f"{len(names)} entries; expected {len(model.stored)}, in contract order"
        return
    for stored, entry in zip(model.stored, entries, strict=True):
        expected = contract_entry(stored)
        if wrong := {key: entry.get(key) for key in expected if entry.get(key) != expected[key]}:
            yield f"{stored.weight.name}: {wrong}; expected { ({key: expected[key] for key in wrong}) }"
        elif flaw := entry_flaw(entry):
            yield f"{stored.weight.name}: {flaw}"


_CHECKS = (
    _catalog,
    _files,
    _spec,
    _sound,
    _page,
    _complete,
    _order,
    _aligned,
    _scales,
    _codes,
    _finite_scales,
    _alike,
    _config,
    _index_rows,
    _checksums,
    _report,
)
