"""Experts as views over mapped shards: right when memory holds the model."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mosaic.runtime.experts.places import ExpertPlaces, check_sum
from mosaic.runtime.experts.store import Loan, PresentExperts
from mosaic.runtime.weights import Expert, Weights


class MappedExperts(PresentExperts):
    """See `ExpertStore`. All experts are there, if perhaps on the disk.

    Where the shards were not read at the start, the spans of a layer's experts are asked for before the first is used:
    a kernel that runs into absent pages reads them a few at a time. `check`: compare an expert's checksum with the
    index when it is first used.
    """

    def __init__(self, weights: Weights, places: ExpertPlaces | None = None, *, check: bool = False) -> None:
        super().__init__()
        self._weights = weights
        self._places = places or ExpertPlaces(weights)
        self._check = check
        self._views: dict[tuple[int, int], Expert] = {}  # of those that were asked for

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """See ExpertStore."""
        for expert in experts:
            place = self._places[layer, expert]
            self._weights.shards[place.shard].will_need(place.offset, place.span_nbytes)

    def lend(self, layer: int, expert: int) -> Loan | None:
        """See ExpertStore. Views: nothing has to be kept for them."""
        self.expert(layer, expert)  # checks it
        place = self._places[layer, expert]
        file = np.frombuffer(self._weights.shards[place.shard].buffer, np.uint8)
        return Loan(
            file[place.offset : place.offset + place.span_nbytes],
            file[place.scale_offset : place.scale_offset + place.scale_nbytes],
        )

    def arriving(self, layer: int, experts: Sequence[int], tokens: int) -> Iterator[Mapping[int, Expert]]:
        """See ExpertStore. One group."""
        if not self._weights.populated:
            self.expect(layer, experts)
        yield from super().arriving(layer, experts, tokens)

    def nbytes(self, layer: int, expert: int) -> int:
        """See ExpertStore."""
        return self._places[layer, expert].nbytes

    def expert(self, layer: int, expert: int) -> Expert:
        """See PresentExperts."""
        if (layer, expert) not in self._views:
            place = self._places[layer, expert]
            buffer = self._weights.shards[place.shard].buffer
            if self._check:
                view, ends = memoryview(buffer), place.scale_offset + place.scale_nbytes
                span = view[place.offset : place.offset + place.span_nbytes]
                check_sum(place, self._weights.shards[place.shard].file, span, view[place.scale_offset : ends])
            self._views[layer, expert] = self._places.expert_at(place, buffer, place.offset, buffer, place.scale_offset)
        return self._views[layer, expert]
