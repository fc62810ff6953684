"""An expert store that writes down what the router chooses, for `mosaic-bench --replay` and routing profiles."""

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.store import ExpertStore, Loan
from mosaic.runtime.experts.trace import TraceHeader, TraceWriter
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.weights import Expert


class RecordedExperts:
    """See `ExpertStore`. Everything else is another store's to do."""

    def __init__(self, store: ExpertStore, writer: TraceWriter) -> None:
        self._store = store
        self._writer = writer

    @property
    def traffic(self) -> Traffic:
        """See ExpertStore."""
        return self._store.traffic

    def observe(self, layer: int, chosen: NDArray[np.int64], elsewhere: Container[int] = ()) -> None:
        """See ExpertStore."""
        self._writer.record(layer, chosen.reshape(-1, chosen.shape[-1]))
        self._store.observe(layer, chosen, elsewhere)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertStore."""
        self._store.expect(layer, experts)

    def lend(self, layer: int, expert: int) -> Loan | None:
        """See ExpertStore."""
        return self._store.lend(layer, expert)

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertStore."""
        return self._store.arriving(layer, experts, tokens)

    def nbytes(self, layer: int, expert: int) -> int:
        """See ExpertStore."""
        return self._store.nbytes(layer, expert)


def open_recording(file: Path, places: ExpertPlaces, model: str) -> TraceWriter:
    """A trace of a model's routing, begun or continued; InputError if the file is something else."""
    if not len(places):
        remedy = "record a mixture of experts"
        raise InputError("a model without experts has no routing", found="dense layers only", remedy=remedy)
    expert_nbytes = max(places[key].nbytes for key in places)
    header = TraceHeader(model, tuple(places.layers), places.num_experts, places.top_k, expert_nbytes)
    return TraceWriter(file, header)
