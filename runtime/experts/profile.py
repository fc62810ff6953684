"""Routing profiles: how often every expert was used, and which ones to load before the first token.

File: JSON, {"mosaic_profile": 1, "layers": [...], "num_experts": E, "uses": [[E numbers] per layer]}. Not a trace: the
order of the uses is not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.runtime.experts.slots import floor
from mosaic.runtime.experts.trace import Trace

VERSION = 1
MOST_USES = 1 << 53  # beyond it JSON's numbers are not exact everywhere


@dataclass(frozen=True, eq=False)
class Profile:
    """Uses of every expert, [layers, num_experts]; `layers`: the decoder layers that have experts, ascending."""

    layers: tuple[int, ...]
    uses: NDArray[np.int64]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.uses.shape[1])

    def __add__(self, other: "Profile") -> "Profile":
        """Both together. ValueError if they are of different models."""
        if (self.layers, self.num_experts) != (other.layers, other.num_experts):
            raise ValueError("profiles of different models")
        return Profile(self.layers, self.uses + other.uses)

    def save(self, file: Path) -> None:
        """Write it to a file."""
        table = {"layers": list(self.layers), "num_experts": self.num_experts, "uses": self.uses.tolist()}
        write_durably(file, to_bytes({"mosaic_profile": VERSION, **table}, indent=0))


def from_trace(trace: Trace) -> Profile:
    """The uses in a trace."""
    header = trace.header
    uses = [np.bincount(choices.ravel(), minlength=header.num_experts) for choices in trace.experts.swapaxes(0, 1)]
    return Profile(header.layers, np.array(uses, np.int64))


def load(file: Path, layers: Sequence[int], num_experts: int) -> Profile:
    """A profile of a model with these layers and experts; InputError if the file is none."""
    value = read_json(file)
    expected = {"mosaic_profile": VERSION, "layers": list(layers), "num_experts": num_experts}
    for name, due in expected.items():
        if value.get(name) != due:
            raise _refused("not a routing profile of this model", file, f"{name} {value.get(name)}", f"{name} {due}")
    uses = value.get("uses")
    sound = isinstance(uses, list) and len(uses) == len(layers) and all(_are_counts(row, num_experts) for row in uses)
    if not sound:
        shape = f"uses: {len(layers)} lists of {num_experts} numbers, 0 or above"
        raise _refused("not a sound routing profile", file, "other uses", shape)
    return Profile(tuple(layers), np.array(uses, np.int64))


def warm(profile: Profile, num_slots: int, top_k: int) -> list[int]:
    """Keys to load at start into so many slots, in this order: the floors of the layers, then the most used.

    The order matters beyond the time it takes: of entries that were never used SlotPolicy evicts those claimed last.
    What the profile never saw used is left out.
    """
    uses = profile.uses
    place = np.argsort(np.argsort(-uses, axis=1, kind="stable"), axis=1)  # of each expert among those of its layer
    in_floor = place < floor(num_slots, len(profile.layers), top_k)
    keys = np.array(profile.layers)[:, None] * profile.num_experts + np.arange(profile.num_experts)
    best = np.lexsort((keys.ravel(), -uses.ravel(), ~in_floor.ravel()))
    best = best[uses.ravel()[best] > 0][:num_slots]
    chosen: list[int] = keys.ravel()[best].tolist()
    return chosen


def _are_counts(row: object, length: int) -> bool:
    if not isinstance(row, list) or len(row) != length:
        return False
    return all(type(number) is int and 0 <= number < MOST_USES for number in row)


def _refused(problem: str, file: Path, found: object, expected: str) -> InputError:
    return InputError(problem, file=file, found=found, expected=expected, remedy="make one from this model")
