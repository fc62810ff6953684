"""Where the bytes of routed experts come from: the expert-offset index and the mapped shards behind it."""

from typing import Any

from mosaic.format import e4m3, index
from mosaic.format.errors import InputError
from mosaic.format.spec import FeedForward
from mosaic.runtime.weights import E4M3Matrix, Expert, Weight, Weights


class MappedExperts:
    """Experts as views over the shards: right when the page cache can hold the model."""

    def __init__(self, weights: Weights) -> None:
        spec = weights.catalog.spec
        self._weights = weights
        size, hidden = spec.moe.intermediate_size, spec.hidden_size
        self._shapes = ((size, hidden), (size, hidden), (hidden, size))
        file = weights.folder / index.EXPERTS_FILE
        rows = index.read_index(file)
        layers = [number for number, layer in enumerate(spec.layers) if layer.feed_forward is FeedForward.MOE]
        keys = [(layer, expert) for layer in layers for expert in range(spec.moe.num_experts)]
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
        self._rows = dict(zip(keys, rows, strict=True))
        self._views: dict[tuple[int, int], Expert] = {}  # of those that were asked for

    def expert(self, layer: int, expert: int) -> Expert:
        """The matrices of one expert."""
        if (layer, expert) not in self._views:
            self._views[layer, expert] = self._view(self._rows[layer, expert])
        return self._views[layer, expert]

    def _view(self, row: Any) -> Expert:
        shard = self._weights.shards[row["shard"].decode()]
        code_dtype, scale_dtype = row["code_dtype"].decode(), row["scale_dtype"].decode()
        offset, scale_offset = int(row["offset"]), int(row["scale_offset"])
        parts: list[Weight] = []
        for shape, nbytes in zip(self._shapes, _sizes(row), strict=True):
            values = shard.view(code_dtype, shape, offset)
            offset += nbytes
            if scale_dtype == index.NO_SCALES:
                parts.append(values)
                continue
            scales = shard.view(scale_dtype, e4m3.grid(shape), scale_offset)
            scale_offset += scales.nbytes
            parts.append(E4M3Matrix(values, scales))
        return Expert(*parts)


def _sizes(row: Any) -> tuple[int, int, int]:
    return int(row["gate_nbytes"]), int(row["up_nbytes"]), int(row["down_nbytes"])
