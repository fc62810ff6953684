"""What a report says of many tensors together, and which of them are worst. Numbers only, not how they look.

Every number on the page (`report_html`) and in the text tables (`report_tables`) that report.json does not hold itself
is computed here, once. A *class* is one role in one part of the model; a *place* is a decoder layer or what lies beside
the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from mosaic.convert.sums import ErrorSums
from mosaic.format.e4m3 import SMALLEST_NORMAL_CODE
from mosaic.format.tensors import Part, Role

Entry = dict[str, Any]
SUBNORMALS = slice(1, SMALLEST_NORMAL_CODE)


@dataclass(frozen=True)
class Tally:
    """E4M3 tensors taken together."""

    entries: list[Entry] = field(default_factory=list)
    histograms: list[Entry] = field(default_factory=list)

    @cached_property
    def weights(self) -> int:
        """How many weights."""
        return sum(prod(entry["shape"]) for entry in self.entries)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(entry["nbytes"] for entry in self.entries)

    @cached_property
    def measured(self) -> list[Entry]:
        """The entries that have an error; those of an FP8 source, passed through, have none."""
        return [entry for entry in self.entries if "signal" in entry]

    @cached_property
    def error(self) -> ErrorSums | None:
        """The error of all that was measured; None if nothing was."""
        return error_of(self.measured)

    @cached_property
    def mse(self) -> list[Entry]:
        """The entries whose scales rule mse chose."""
        return [entry for entry in self.measured if "amax_noise" in entry]

    @property
    def mse_error(self) -> ErrorSums | None:
        """The error of these."""
        return error_of(self.mse)

    @property
    def amax_error(self) -> ErrorSums | None:
        """The error that rule amax would have made of them."""
        return error_of([entry | {"noise": entry["amax_noise"]} for entry in self.mse])

    @cached_property
    def decibels(self) -> list[float]:
        """SQNR of the single tensors; exact ones have none."""
        return [entry["sqnr_db"] for entry in self.measured if entry["sqnr_db"] is not None]

    @cached_property
    def codes(self) -> list[int]:
        """How often each magnitude occurs."""
        return [sum(counts) for counts in zip(*(entry["codes"] for entry in self.histograms), strict=True)]

    @cached_property
    def scales(self) -> dict[int, int]:
        """How many blocks have a scale in [2^k, 2^(k + 1))."""
        counts: dict[int, int] = {}
        for histogram in self.histograms:
            for exponent, count in histogram["scales"].items():
                counts[int(exponent)] = counts.get(int(exponent), 0) + count
        return dict(sorted(counts.items()))

    @property
    def scale_range(self) -> tuple[float, float] | None:
        """Smallest and largest scale."""
        scaled = [entry for entry in self.entries if "scale_min" in entry]
        return (min(e["scale_min"] for e in scaled), max(e["scale_max"] for e in scaled)) if scaled else None

    @property
    def zero_share(self) -> float | None:
        """Share of codes that are 0, whether or not the weight was."""
        return self._share(slice(1))

    @property
    def subnormal_share(self) -> float | None:
        """Share of codes that are subnormal."""
        return self._share(SUBNORMALS)

    def _share(self, codes: slice) -> float | None:
        total = sum(self.codes)
        return sum(self.codes[codes]) / total if total else None


@dataclass(frozen=True)
class Place:
    """A decoder layer, or what lies beside the layers, with its tensors by role."""

    part: str
    layer: int | None
    total: Tally
    roles: dict[str, Tally]

    @property
    def label(self) -> str:
        """Number of the layer, or what lies there: outside the layers, only the head can be E4M3."""
        if self.part == Part.DECODER and self.layer is not None:
            return str(self.layer)
        names: dict[str, str] = {Part.OUTSIDE: "head", Part.MTP: "MTP"}
        name = names.get(self.part, self.part)
        return name if self.layer is None else f"{name} {self.layer}"


def error_of(measured: list[Entry]) -> ErrorSums | None:
    """The error of tensors taken together; None for no tensors."""
    if not measured:
        return None
    sizes = [prod(entry["shape"]) for entry in measured]
    return ErrorSums(
        count=sum(sizes),
        signal=sum(entry["signal"] for entry in measured),
        noise=sum(entry["noise"] for entry in measured),
        max_abs_error=max(entry["max_abs_error"] for entry in measured),
        zeroed=sum(round(entry["zeroed_share"] * size) for entry, size in zip(measured, sizes, strict=True)),
    )


class Survey:
    """The E4M3 tensors of a report, taken together in the ways that tables and pictures need."""

    def __init__(self, report: Entry) -> None:
        self.report = report

    def tallies(self, *keys: str) -> dict[tuple[Any, ...], Tally]:
        """Tensors and histograms by some of role, part and layer; roles and parts in their own order."""
        groups: dict[tuple[Any, ...], Tally] = {}
        for entry in self.report["tensors"]:
            if entry["dtype"] == "F8_E4M3":
                groups.setdefault(tuple(entry[key] for key in keys), Tally()).entries.append(entry)
        for histogram in self.report["histograms"]:
            groups.setdefault(tuple(histogram[key] for key in keys), Tally()).histograms.append(histogram)
        return dict(sorted(groups.items(), key=lambda item: [_rank(value) for value in item[0]]))

    @cached_property
    def overall(self) -> Tally:
        """All of them."""
        return self.tallies().get((), Tally())

    @cached_property
    def classes(self) -> dict[tuple[str, str], Tally]:
        """By role and part, decoder first."""
        return {(role, part): tally for (part, role), tally in self.tallies("part", "role").items()}

    @cached_property
    def roles(self) -> list[str]:
        """Which roles there are."""
        return sorted({role for role, _ in self.classes}, key=_rank)

    @cached_property
    def places(self) -> list[Place]:
        """Where they lie: decoder layers by number, then the rest."""
        totals = self.tallies("part", "layer")
        found = {(part, layer): Place(part, layer, total, {}) for (part, layer), total in totals.items()}
        for (part, layer, role), tally in self.tallies("part", "layer", "role").items():
            found[part, layer].roles[role] = tally
        return list(found.values())


def worst_tensors(report: Entry, count: int) -> list[Entry]:
    """The measured tensors with the lowest SQNR, the lowest first; exact ones are none of them."""
    lossy = [entry for entry in report["tensors"] if entry.get("sqnr_db") is not None]
    return sorted(lossy, key=lambda entry: float(entry["sqnr_db"]))[:count]


def _rank(value: str | int | None) -> int:
    """Where a role, a part or a layer stands among its kind; no layer before the first."""
    order: Sequence[str] = [*Part, *Role]
    if isinstance(value, str):
        return order.index(value) if value in order else len(order)
    return -1 if value is None else value
