"""Where the bytes of every routed expert lie, by the expert-offset index. Reads no expert."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mosaic.format import e4m3, index
from mosaic.format.errors import InputError
from mosaic.format.spec import FeedForward
from mosaic.runtime.resident import tensor_at
from mosaic.runtime.weights import E4M3Matrix, Expert, Weight, Weights


@dataclass(frozen=True)
class Place:
    """One expert: its span (gate | up | down) and its scales, in bytes from the start of its shard."""

    layer: int
    expert: int
    shard: str
    code_dtype: str
    scale_dtype: str  # index.NO_SCALES if there are none
    offset: int
    sizes: tuple[int, int, int]  # of gate, up and down
    scale_offset: int
    scale_nbytes: int
    crc32c: int  # of the span, continued over the scales

    @property
    def span_nbytes(self) -> int:
        """Bytes of the span."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes read to use the expert once."""
        return self.span_nbytes + self.scale_nbytes

    @property
    def kind(self) -> tuple[str, str]:
        """What experts of equal layout have in common."""
        return self.code_dtype, self.scale_dtype


class ExpertPlaces:
    """The expert index of a model, checked against the headers of its shards."""

    def __init__(self, weights: Weights) -> None:
        spec = weights.catalog.spec
        self.top_k = spec.moe.top_k if spec.moe.num_experts else 0
        self.num_experts = spec.moe.num_experts
        self.layers = [number for number, layer in enumerate(spec.layers) if layer.feed_forward is FeedForward.MOE]
        size, hidden = spec.moe.intermediate_size, spec.hidden_size
        self._shapes = ((size, hidden), (size, hidden), (hidden, size))
        file = weights.folder / index.EXPERTS_FILE
        rows = index.read_index(file)
        keys = [(layer, expert) for layer in self.layers for expert in range(self.num_experts)]
        found = [tuple(row)[:-1] for row in rows.tolist()]
        expected = [(*key, *weights.expert_place(*key)) for key in keys]
        if found != expected:
            wrong = next((row for row in zip(found, expected, strict=False) if row[0] != row[1]), None)
            raise InputError(
                "the expert index does not belong to this model",
                file=file,
                found=wrong[0] if wrong else f"{len(found)} rows",
                expected=wrong[1] if wrong else f"{len(expected)} rows",
                remedy="convert the checkpoint again",
            )
        self._places = {key: _place(row) for key, row in zip(keys, rows, strict=True)}

    def __len__(self) -> int:
        """How many experts there are in all layers."""
        return len(self._places)

    def __getitem__(self, key: tuple[int, int]) -> Place:
        """The place of (layer, expert)."""
        return self._places[key]

    def __iter__(self) -> Any:
        """All (layer, expert), in order."""
        return iter(self._places)

    def expert_at(self, place: Place, codes: Any, offset: int, scales: Any, scale_offset: int) -> Expert:
        """Views of an expert whose span is at `offset` of a buffer, and its scales at `scale_offset` of another."""
        parts: list[Weight] = []
        for shape, nbytes in zip(self._shapes, place.sizes, strict=True):
            values: Tensor = tensor_at(codes, place.code_dtype, shape, offset)
            offset += nbytes
            if place.scale_dtype == index.NO_SCALES:
                parts.append(values)
                continue
            multipliers = tensor_at(scales, place.scale_dtype, e4m3.grid(shape), scale_offset)
            scale_offset += multipliers.nbytes
            parts.append(E4M3Matrix(values, multipliers))
        return Expert(*parts)


def check_sum(place: Place, file: Path, span: memoryview, scales: memoryview) -> None:
    """InputError if the bytes of an expert are not those that were written."""
    found = index.crc32c(scales, index.crc32c(span))
    if found != place.crc32c:
        raise InputError(
            f"expert {place.expert} of layer {place.layer} is damaged",
            file=file,
            found=f"CRC32C {found:08x}",
            expected=f"{place.crc32c:08x}, as in the expert index",
            remedy="copy the model directory again, or convert it again; mosaic-verify tells more",
        )


def _place(row: Any) -> Place:
    return Place(
        layer=int(row["layer"]),
        expert=int(row["expert"]),
        shard=row["shard"].decode(),
        code_dtype=row["code_dtype"].decode(),
        scale_dtype=row["scale_dtype"].decode(),
        offset=int(row["offset"]),
        sizes=(int(row["gate_nbytes"]), int(row["up_nbytes"]), int(row["down_nbytes"])),
        scale_offset=int(row["scale_offset"]),
        scale_nbytes=int(row["scale_nbytes"]),
        crc32c=int(row["crc32c"]),
    )
