"""Which file a tensor goes to, in which order, at which offset. Not how it is written (`shard`).

A shard holds, without gaps: every expert span (gate | up | down of one routed expert back to back), the other E4M3
tensors, F32, then the 2-byte types with the scales of each expert contiguous. The header is padded with spaces such
that the data starts on a page; docs/FORMAT.md section 2 is normative.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mosaic.format.tensors import Part, Role, TensorSpec

PAGE = 4096
SHARD_SUFFIX = ".safetensors"
SHARD_METADATA = {"format": "pt"}
OUTSIDE_FILE = "outside.safetensors"
MTP_FILE = "mtp.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
WORK_FOLDER = ".mosaic-convert"  # records and unfinished shards of a conversion that is not complete

#: Bytes per element of the dtypes a shard may hold, by their safetensors names.
WIDTH = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
_ENTRY_WIDTH = WIDTH | {"I32": 4, "U32": 4}  # and those of other files of ours


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as a file stores it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _ENTRY_WIDTH[self.dtype]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the contract with the dtypes it is stored in; `scale` is None unless it is E4M3."""

    spec: TensorSpec
    weight: Entry
    scale: Entry | None


@dataclass(frozen=True)
class ShardLayout:
    """One shard: its entries in file order and where each begins, counted from the start of the file."""

    file: str
    header: bytes  # with the 8 length bytes and the padding
    entries: tuple[Entry, ...]
    offsets: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def file_of(spec: TensorSpec, num_layers: int) -> str:
    """Shard of a tensor."""
    if spec.part is Part.DECODER:
        assert spec.layer is not None
        return layer_file(spec.layer, num_layers)
    return MTP_FILE if spec.part is Part.MTP else OUTSIDE_FILE


def layer_file(layer: int, num_layers: int) -> str:
    """Shard of a decoder layer: layers-00.safetensors and so on, in digits that sort."""
    return f"layers-{layer:0{max(2, len(str(num_layers - 1)))}d}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether a file of this name can only be a shard of ours."""
    return name in (OUTSIDE_FILE, MTP_FILE) or bool(re.fullmatch(r"layers-\d{2,}\.safetensors", name))


def shard_layout(file: str, tensors: Sequence[Stored]) -> ShardLayout:
    """Order and place the tensors of one shard; `tensors` in contract order, experts first."""
    parts = [(_rank(stored, entry), entry) for stored in tensors for entry in (stored.weight, stored.scale) if entry]
    entries = tuple(entry for _, entry in sorted(parts, key=lambda part: part[0]))
    head = header(entries)
    offsets, position = {}, len(head)
    for entry in entries:
        offsets[entry.name] = position
        position += entry.nbytes
    return ShardLayout(file, head, entries, offsets)


def _rank(stored: Stored, entry: Entry) -> int:
    if stored.spec.role is Role.ROUTED_EXPERTS and entry is stored.weight:
        return 0
    return {"F8_E4M3": 1, "F32": 2}.get(entry.dtype, 3)


def header(entries: Iterable[Entry], metadata: Mapping[str, str] = SHARD_METADATA) -> bytes:
    """A safetensors header for back-to-back entries, padded so that the data begins on a page."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)
