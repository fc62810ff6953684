"""The block scales of all routed experts, in memory: 384 bytes where an expert has 3 MiB, too few for a read."""

import numpy as np
from numpy.typing import NDArray

from mosaic.format.direct import read
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.shards import ShardFiles


class ResidentScales:
    """Scales by (layer, expert), as their shard has them: gate | up | down."""

    def __init__(self, places: ExpertPlaces, files: ShardFiles) -> None:
        self.most = 0  # bytes of one expert
        self._scales: dict[tuple[int, int], NDArray[np.uint8]] = {}
        spans: dict[str, tuple[int, int]] = {}  # by shard: from the first to the end of the last
        for key in places:
            place = places[key]
            end = place.scale_offset + place.scale_nbytes
            first, last = spans.get(place.shard, (place.scale_offset, end))
            spans[place.shard] = min(first, place.scale_offset), max(last, end)
            self.most = max(self.most, place.scale_nbytes)
        self.nbytes = sum(end - first for first, end in spans.values())
        data = {shard: self._read(files, shard, first, end) for shard, (first, end) in spans.items()}
        for key in places:
            place = places[key]
            first = place.scale_offset - spans[place.shard][0]
            self._scales[key] = data[place.shard][first : first + place.scale_nbytes]

    def __getitem__(self, key: tuple[int, int]) -> NDArray[np.uint8]:
        """The bytes of one expert's scales; none if it has none."""
        return self._scales[key]

    @staticmethod
    def _read(files: ShardFiles, shard: str, first: int, end: int) -> NDArray[np.uint8]:
        try:
            data = read(files.descriptor(shard), first, end - first).copy()  # without the pages around it
        except OSError as error:
            raise files.failed(shard, error) from error
        if len(data) < end - first:
            raise files.failed(shard, EOFError("the file ends too early"))
        return data
