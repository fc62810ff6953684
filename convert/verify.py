"""Checks every numbered invariant of docs/FORMAT.md on a finished model directory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mosaic.convert import report
from mosaic.convert.model_files import ModelFiles, Scan
from mosaic.convert.plan import COMPANIONS
from mosaic.convert.quantize import check_kernels
from mosaic.convert.report import REPORT_FILE, REPORT_VERSION, contract_entry, entry_flaw
from mosaic.convert.sums import ErrorSums
from mosaic.format import architectures, e4m3, index, layout
from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import Stored
from mosaic.format.tensors import QUANTIZABLE, Role

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

    def text(self) -> str:
        """A line, and one for each failure."""
        state = "ok" if self.holds else "FAILED" if self.checked else "not checked"
        return "\n     ".join([f"{self.invariant:<4} {state:<12} {self.title}", *self.failures])


def verify(folder: Path, progress: Callable[[int], object] = lambda _: None) -> list[Result]:
    """Check every invariant; InputError if the directory is not a Mosaic model directory at all.

    Invariants that cannot be judged because the files are damaged beyond reading are reported as not checked.
    """
    check_kernels()
    if not (folder / "mosaic.json").is_file():
        read_catalog(folder)
    model = ModelFiles(folder, progress)
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


def verify_showing_progress(folder: Path) -> list[Result]:
    """`verify` with a progress bar on standard error, if that is a terminal."""
    with tqdm(unit="B", unit_scale=True, disable=None, desc="verify", leave=False) as bar:
        return verify(folder, bar.update)


def _catalog(model: ModelFiles) -> Iterator[str]:
    """V1 The catalog has the known version, exactly the known keys and a spec that parses."""
    if not model.catalog.files:
        yield "the catalog names no files"


def _files(model: ModelFiles) -> Iterator[str]:
    """V2 Every file of the catalog is there with its size and sha256, and no other shard or companion file."""
    scans = _scans(model)
    for name, record in model.catalog.files.items():
        if not (model.folder / name).is_file():
            yield f"{name}: absent"
            continue
        size, sha256 = (scans[name].nbytes, scans[name].sha256) if name in scans else model.digest(name)
        if (size, sha256) != (record.nbytes, record.sha256):
            yield f"{name}: {size} bytes, sha256 {sha256}; expected {record.nbytes}, {record.sha256}"
    for file in sorted(model.folder.iterdir()):
        if (
            file.name.endswith(layout.SHARD_SUFFIX) or file.name in COMPANIONS
        ) and file.name not in model.catalog.files:
            yield f"{file.name}: not in the catalog"


def _scans(model: ModelFiles) -> dict[str, Scan]:
    """The pass over all shards; nothing if a header is not sound, which V4 will say, or the configuration (V3)."""
    try:
        return model.scans
    except InputError:
        return {}


def _sound(model: ModelFiles) -> Iterator[str]:
    """V4 Every shard is a sound safetensors file."""
    if not model.headers:
        yield "no shards"


def _spec(model: ModelFiles) -> Iterator[str]:
    """V3 The catalog's spec is the one config.json gives."""
    if model.spec != model.catalog.spec:
        yield f"{model.spec} by config.json; the catalog has {model.catalog.spec}"


def _page(model: ModelFiles) -> Iterator[str]:
    """V5 The data of every shard starts on a page."""
    for name in model.headers:
        with (model.folder / name).open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        if start % layout.PAGE:
            yield f"{name}: data starts at byte {start}"


def _complete(model: ModelFiles) -> Iterator[str]:
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
        file = layout.file_of(spec, len(model.spec.layers))
        shape = spec.shape if name in expected else info.shape  # the shape of scales: V9
        if (info.shape, info.file.name) != (shape, file):
            yield f"{name}: {info.shape} in {info.file.name}; expected {shape} in {file}"
        if info.dtype not in layout.WIDTH:
            yield f"{name}: {info.dtype}; expected {', '.join(layout.WIDTH)}"


def _order(model: ModelFiles) -> Iterator[str]:
    """V7 The tensors of every shard stand in the order of the format."""
    for file, expected in model.layouts.items():
        found = sorted(model.headers[file], key=lambda name: model.tensors[name].offset)
        wrong = (pair for pair in zip(found, expected.entries, strict=True) if pair[0] != pair[1].name)
        if first := next(wrong, None):
            yield f"{file}: {first[0]} where {first[1].name} should stand"


def _aligned(model: ModelFiles) -> Iterator[str]:
    """V8 Every expert span of whole blocks starts on a multiple of 4096."""
    for members in model.experts.values():
        offset = model.tensors[members[0].weight.name].offset
        if all(e4m3.whole_blocks(member.spec.shape) for member in members) and offset % layout.PAGE:
            yield f"{members[0].weight.name}: at byte {offset}"


def _scales(model: ModelFiles) -> Iterator[str]:
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


def _codes(model: ModelFiles) -> Iterator[str]:
    """V10 No code is NaN."""
    for scan in model.scans.values():
        for name, counts in scan.codes.items():
            if count := counts[e4m3.NAN_CODE]:
                yield f"{name}: {count} NaN codes"


def _finite_scales(model: ModelFiles) -> Iterator[str]:
    """V11 Every scale is finite and above 0."""
    for stored in model.stored:
        if stored.scale:
            scales = model.scales(stored.scale.name).astype(np.float32)
            if not (np.isfinite(scales) & (scales > 0)).all():
                yield f"{stored.scale.name}: from {scales.min()} to {scales.max()}"


def _alike(model: ModelFiles) -> Iterator[str]:
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


def _config(model: ModelFiles) -> Iterator[str]:
    """V13 config.json describes the quantization exactly."""
    found = model.config.get("quantization_config")
    unquantized = [stored.spec for stored in model.stored if stored.scale is None]
    expected = architectures.quantization_config(model.architecture, unquantized)
    if found != (expected if len(unquantized) < len(model.stored) else None):
        yield f"quantization_config is {found!r:.200}"


def _index_rows(model: ModelFiles) -> Iterator[str]:
    """V14 experts.npy has one row per routed expert and agrees with the headers."""
    rows = index.read_index(model.folder / index.EXPERTS_FILE)
    expected = [_expected_row(model, key, members) for key, members in sorted(model.experts.items())]
    if len(rows) != len(expected):
        yield f"{len(rows)} rows; expected {len(expected)}"
    for row, wanted in zip(rows, expected, strict=False):
        if row.tolist()[:-1] != wanted:
            yield f"layer {row['layer']} expert {row['expert']}: {row.tolist()[:-1]}; expected {wanted}"


def _expected_row(model: ModelFiles, key: tuple[int, int], members: list[Stored]) -> tuple[Any, ...]:
    weights = [model.tensors[member.weight.name] for member in members]
    scales = [model.tensors[member.scale.name].span for member in members if member.scale]
    return (*key, *index.place(weights[0].file.name, [weight.span for weight in weights], scales))


def _checksums(model: ModelFiles) -> Iterator[str]:
    """V15 Every CRC of experts.npy agrees with the bytes."""
    found = {key: crc for scan in model.scans.values() for key, crc in scan.crc32c.items()}
    for row in index.read_index(model.folder / index.EXPERTS_FILE):
        key = (int(row["layer"]), int(row["expert"]))
        if key not in found or row.tolist()[:-1] != _expected_row(model, key, model.experts[key]):
            continue  # V14 has said so
        if row["crc32c"] != found[key]:
            yield f"layer {key[0]} expert {key[1]}: CRC {found[key]:08x}; the index has {row['crc32c']:08x}"


def _report_entries(model: ModelFiles) -> Iterator[str]:
    """V16 report.json has one true entry per weight."""
    value = read_json(model.folder / REPORT_FILE)
    entries, version = value.get("tensors"), value.get("version")
    if type(version) is not int or version != REPORT_VERSION or not isinstance(entries, list):
        yield f"version {version!r} with tensors {entries!r:.60}; expected {REPORT_VERSION} and a list"
        return
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    if names != [stored.weight.name for stored in model.stored]:
        yield f"{len(names)} entries; expected {len(model.stored)}, in contract order"
        return
    sound = True
    for stored, entry in zip(model.stored, entries, strict=True):
        expected = contract_entry(stored)
        if wrong := {key: entry.get(key) for key in expected if entry.get(key) != expected[key]}:
            yield f"{stored.weight.name}: {wrong}; expected { ({key: expected[key] for key in wrong}) }"
        elif flaw := entry_flaw(entry):
            yield f"{stored.weight.name}: {flaw}"
        else:
            continue
        sound = False
    if sound and value.get("summary") != report.summary(entries):
        yield "the summary is not that of the tensors"


def _histograms(model: ModelFiles) -> Iterator[str]:
    """V17 The histograms of report.json, and its shares of subnormal codes, are those of the codes and scales."""
    value = read_json(model.folder / REPORT_FILE)
    if value.get("histograms") != report.histograms(model.use):
        yield "the histograms are not those of the codes and scales"
    entries = {stored.weight.name: use for stored, use in model.use}
    tensors = value.get("tensors")
    for entry in tensors if isinstance(tensors, list) else ():
        use = entries.get(str(entry.get("name"))) if isinstance(entry, dict) else None
        expected = report.measures(ErrorSums(), use) if use else {}
        if wrong := {key: entry.get(key) for key in expected if entry.get(key) != expected[key]}:
            yield f"{entry['name']}: {wrong}; expected { ({key: expected[key] for key in wrong}) }"


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
    _report_entries,
    _histograms,
)
