"""The real 35B releases as far as headers go: every name, dtype and shape, and no weights.

A converter plans from headers alone, so a plan for the real 72 GB model can be tested on any machine: the checkpoint
written here has the published sizes to the byte, but its files are sparse. The listing comes from transformers and the
published inventories (fixtures/make_listing.py), not from Mosaic. Which tensor lies in which shard is made up.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from support.shards import split, write_index

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen3_6_35b_a3b.json"
ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


class Entry(NamedTuple):
    """One tensor of a listing."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


Files = dict[str, list[Entry]]


def load_listing(variant: str = "3.6") -> tuple[dict[str, Any], Files, float]:
    """(config, {shard file: tensors}, total_size as published: a float in 3.6, an integer in 3.5)."""
    listing = json.loads(FIXTURE.read_text())
    config: dict[str, Any] = listing["config"]
    files = {file: [Entry(n, d, tuple(s)) for n, d, s in entries] for file, entries in listing["files"].items()}
    if variant == "3.6":
        return config, files, float(total_bytes(files))
    if variant != "3.5":
        raise ValueError(f"variant: found {variant!r}, expected '3.5' or '3.6'")
    del config["text_config"]["bos_token_id"]
    config["text_config"]["mlp_only_layers"] = []
    config["transformers_version"] = "4.57.0.dev0"
    entries = [old for shard in files.values() for entry in shard for old in _as_in_3_5(entry)]
    files = pack(entries, "model.safetensors", 14)
    return config, files, total_bytes(files)


def pack(entries: list[Entry], stem: str, shards: int) -> Files:
    """Cut an ordered listing into shard files of about equal size."""
    by_name = {entry.name: entry for entry in entries}
    groups = split({name: entry.nbytes for name, entry in by_name.items()}, stem, shards)
    return {file: [by_name[name] for name in names] for file, names in groups.items()}


def total_bytes(files: Files) -> int:
    """Bytes of all tensors, headers not counted."""
    return sum(entry.nbytes for entries in files.values() for entry in entries)


def write_sparse_checkpoint(folder: Path, config: dict[str, Any], files: Files, metadata_total: float) -> None:
    """Write config.json, the index and shards whose headers are real and whose data is one hole (zeros when read)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    for file, entries in files.items():
        _write_sparse(folder / file, entries)
    weight_map = {entry.name: file for file, entries in files.items() for entry in entries}
    write_index(folder, weight_map, metadata_total)


def _write_sparse(path: Path, entries: list[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + Entry(name, dtype, shape).nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _as_in_3_5(entry: Entry) -> list[Entry]:
    """What this tensor of 3.6 is in Qwen3.5-35B-A3B: F32 where that has F32, MTP experts one by one."""
    name, dtype, shape = entry
    if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
        return [Entry(name, "F32", shape)]
    if not name.startswith("mtp.") or ".experts." not in name:
        return [entry]
    experts, kind = name.rsplit(".", 1)
    count, rows, columns = shape
    kinds = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    single = (rows // len(kinds), columns)
    return [Entry(f"{experts}.{e}.{kind}.weight", dtype, single) for e in range(count) for kind in kinds]
