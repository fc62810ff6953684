"""Measures any model directory against the checkpoint it was made from, into a report like the converter's own.

Independent of the converter's error sums, which come from the native quantiser: here both sides are read back,
dequantised and subtracted in numpy.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mosaic.convert import report
from mosaic.convert.compare import Model, Pair, pairs
from mosaic.convert.recipe import Treatment
from mosaic.format.errors import InputError
from mosaic.format.tensors import TensorSpec

#: Relative. The quantiser squares and adds 8 squares in float32: 11 roundings of 2^-24 at most, and dB follow.
TOLERANCE = 1e-6
EXACT = ("name", "shape", "dtype", "max_abs_error", "zeroed_share", "nonfinite_zeroed", *report.USE)
ROUNDED = ("relative_l2", "sqnr_db", "signal", "noise")


def measure(source: Model, stored: Model, workers: int, progress: Callable[[int], object]) -> dict[str, Any]:
    """The report of `stored` against `source`: recipe `measured`; `unmeasured` is what `source` lacks."""
    shapes = [spec.name for key, spec in stored.contract.items() if _other_shape(source, key, spec)]
    if shapes:
        raise InputError(
            "the two are not the same model",
            file=stored.checkpoint.folder,
            tensor=shapes[0],
            found=f"{len(shapes)} tensors of other shapes than in {source.checkpoint.folder}",
            expected="the checkpoint that it was made from",
            remedy="give the right checkpoint; mosaic-report OUT OTHER compares any two",
        )
    found = list(pairs(source, stored, workers, progress))
    entries = [_entry(pair) for pair in found]
    dropped = [spec.name for key, spec in source.contract.items() if key not in stored.contract]
    unmeasured = [spec.name for key, spec in stored.contract.items() if key not in source.contract]
    head = {
        "recipe": "measured",
        "unmeasured": unmeasured,
        "dropped": dropped,
        "unlisted_in_source": source.checkpoint.unlisted,
    }
    return report.value(head, entries, report.histograms((pair.second, pair.use) for pair in found))


def _other_shape(source: Model, key: str, spec: TensorSpec) -> bool:
    return key in source.contract and source.contract[key].shape != spec.shape


def _entry(pair: Pair) -> dict[str, Any]:
    entry = report.contract_entry(pair.second) | {"treatment": _treatment(pair)}
    if pair.sums.nonfinite and not pair.sums.noise:  # nothing changed but what was no number: as the converter tells it
        pair.sums.count = 0
    if pair.incomparable:
        entry["note"] = f"{pair.incomparable} stored weights are not numbers and were left out"
    return entry | report.measures(pair.sums, pair.use)


def _treatment(pair: Pair) -> str:
    """What must have been done to the tensor."""
    if pair.second.scale:
        return report.PASS_THROUGH if pair.equal else Treatment.E4M3
    return Treatment.KEEP if pair.equal else pair.second.weight.dtype.lower()


def disagreements(recorded: dict[str, Any], measured: dict[str, Any]) -> Iterator[str]:
    """Where the converter's report and a measured one differ by more than rounding."""
    ours = {entry["name"]: entry for entry in recorded["tensors"]}
    for entry in measured["tensors"]:
        other = ours.pop(entry["name"], None)
        if other is None:
            yield f"{entry['name']}: not in report.json"
            continue
        yield from (
            f"{entry['name']}: {key} is {entry.get(key)}, report.json says {other.get(key)}"
            for key in _differing(entry, other)
        )
    yield from (f"{name}: only in report.json" for name in ours)
    if recorded["histograms"] != measured["histograms"]:
        yield "the histograms of codes and scales differ"


def _differing(entry: dict[str, Any], other: dict[str, Any]) -> Iterable[str]:
    exact = not entry.get("noise") and not other.get("noise")  # no error in either, however that is told
    for key in EXACT:
        if entry.get(key) != other.get(key) and not (exact and key in report.MEASURES):
            yield key
    for key in () if exact else ROUNDED:
        one, two = entry.get(key), other.get(key)
        if (one is None) != (two is None) or (one and abs(one - two) > TOLERANCE * abs(one)):
            yield key
