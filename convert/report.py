"""report.json: the quantization error of every tensor, and its summary by class. Numbers only, no opinions."""

import json
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from mosaic.convert.plan import ConversionPlan, Planned
from mosaic.convert.recipe import ScaleRule, Treatment
from mosaic.convert.sums import CodeUse, ErrorSums, decibels, relative
from mosaic.format import e4m3, index
from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import Stored
from mosaic.format.tensors import Part, Role

REPORT_FILE = "report.json"
HTML_FILE = "report.html"  # what mosaic-report makes of it; no part of the model directory
REPORT_VERSION = 2

MEASURES = ("relative_l2", "sqnr_db", "max_abs_error", "zeroed_share", "signal", "noise")
USE = ("scale_min", "scale_max", "subnormal_share")
NULLABLE = ("relative_l2", "sqnr_db")  # where there is no signal, or no noise
PASS_THROUGH = "pass-through"
FLOAT32_RANGE = 150  # powers of two


def contract_entry(stored: Stored) -> dict[str, Any]:
    """The part of an entry that follows from what is stored."""
    spec, weight = stored.spec, stored.weight
    return {
        "name": spec.name,
        "role": spec.role,
        "part": spec.part,
        "layer": spec.layer,
        "expert": spec.expert,
        "shape": list(spec.shape),
        "dtype": weight.dtype,
        "nbytes": weight.nbytes + (stored.scale.nbytes if stored.scale else 0),
    }


def tensor_entry(planned: Planned, sums: ErrorSums, use: CodeUse) -> dict[str, Any]:
    """One tensor: what it is, how it was treated, and what that cost."""
    treatment = PASS_THROUGH if planned.passes_through else planned.treatment
    entry = contract_entry(planned.stored) | {"treatment": treatment}
    if planned.note:
        entry["note"] = planned.note
    if treatment == Treatment.E4M3 and planned.scale_rule is not ScaleRule.AMAX:
        entry |= {"scale_rule": planned.scale_rule, "amax_noise": sums.amax_noise}
    return entry | measures(sums, use)


def measures(sums: ErrorSums, use: CodeUse) -> dict[str, Any]:
    """What was measured of one tensor."""
    entry: dict[str, Any] = {"nonfinite_zeroed": sums.nonfinite} if sums.nonfinite else {}
    if sums.count:
        values = (sums.relative_l2, sums.sqnr_db, sums.max_abs_error, sums.zeroed / sums.count, sums.signal, sums.noise)
        entry |= dict(zip(MEASURES, values, strict=True))
    if use.scale_max:
        entry |= dict(zip(USE, (use.scale_min, use.scale_max, use.subnormal_share), strict=True))
    return entry


def histograms(tensors: Iterable[tuple[Stored, CodeUse]]) -> list[dict[str, Any]]:
    """How codes (by magnitude) and scales (by power of two) are used, one row per role, part and layer."""
    groups: dict[tuple[Any, ...], CodeUse] = {}
    for stored, use in tensors:
        if stored.scale:
            groups.setdefault((stored.spec.role, stored.spec.part, stored.spec.layer), CodeUse()).merge(use)
    return [
        {
            **dict(zip(("role", "part", "layer"), key, strict=True)),
            "codes": use.codes.tolist(),
            "scales": {str(exponent): count for exponent, count in use.scales.items()},
        }
        for key, use in groups.items()
    ]


def entry_flaw(entry: dict[str, Any]) -> str | None:
    """What is wrong with the part of an entry that only the conversion knew; None if nothing is."""
    treatment = entry.get("treatment")
    if treatment != PASS_THROUGH and treatment not in [*Treatment]:
        return f"treatment {treatment!r}"
    quantized = entry["dtype"] == "F8_E4M3"
    if quantized != (treatment in (Treatment.E4M3, PASS_THROUGH)):
        return f"treatment {treatment!r} for {entry['dtype']}"
    measured = treatment not in (PASS_THROUGH, Treatment.KEEP)
    needed = (MEASURES if measured else ()) + (USE if quantized else ())
    if missing := [key for key in needed if not isinstance(entry.get(key, ""), float | int | None)]:
        return f"no usable {', '.join(missing)}"
    if "signal" in entry and isinstance(entry["signal"], float | int) and isinstance(entry["noise"], float | int):
        derived = (relative(entry["signal"], entry["noise"]), decibels(entry["signal"], entry["noise"]))
        if (entry["relative_l2"], entry["sqnr_db"]) != derived:
            return "relative_l2 and sqnr_db are not those of signal and noise"
    return None


def summary(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per role, part and treatment, in order of appearance."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["role"], entry["part"], entry["treatment"]), []).append(entry)
    return [_row(key, members) for key, members in groups.items()]


def _row(key: tuple[str, ...], members: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("role", "part", "treatment"), key, strict=True))
    sizes = [prod(member["shape"]) for member in members]
    row |= {"tensors": len(members), "weights": sum(sizes), "nbytes": sum(member["nbytes"] for member in members)}
    measured = [(member, size) for member, size in zip(members, sizes, strict=True) if "signal" in member]
    if measured:
        signal, noise = (sum(member[name] for member, _ in measured) for name in ("signal", "noise"))
        row["relative_l2"] = relative(signal, noise)
        row["sqnr_db"] = decibels(signal, noise)
        row["max_abs_error"] = max(member["max_abs_error"] for member, _ in measured)
        zeroed = sum(member["zeroed_share"] * size for member, size in measured)
        row["zeroed_share"] = zeroed / sum(size for _, size in measured)
    searched = [member for member in members if "amax_noise" in member]
    if searched:
        amax_noise, noise = (sum(member[name] for member in searched) for name in ("amax_noise", "noise"))
        row["mse_gain_db"] = decibels(amax_noise, noise)
    scaled = [(member, size) for member, size in zip(members, sizes, strict=True) if "scale_min" in member]
    if scaled:
        row["scale_min"] = min(member["scale_min"] for member, _ in scaled)
        row["scale_max"] = max(member["scale_max"] for member, _ in scaled)
        subnormal = sum(member["subnormal_share"] * size for member, size in scaled)
        row["subnormal_share"] = subnormal / sum(size for _, size in scaled)
    return row


def head(plan: ConversionPlan) -> dict[str, Any]:
    """What a report says of the conversion as a whole."""
    return {
        "recipe": plan.recipe.name,
        "dropped": list(plan.dropped),
        "unlisted_in_source": plan.checkpoint.unlisted,
    }


def value(head: dict[str, Any], entries: list[dict[str, Any]], histograms: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole report."""
    rows = {"summary": summary(entries), "histograms": histograms, "tensors": entries}
    return {"version": REPORT_VERSION} | head | rows


def to_bytes(value: dict[str, Any]) -> bytes:
    """The file: one line per tensor, so that it can be read and compared with line tools."""
    lines = []
    for key, entry in value.items():
        rows = isinstance(entry, list) and entry and isinstance(entry[0], dict)
        text = "[\n" + ",\n".join(json.dumps(row) for row in entry) + "\n]" if rows else json.dumps(entry)
        lines.append(f'"{key}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read(file: Path) -> dict[str, Any]:
    """A report of this version; InputError if it is none. Only what tables and page need is checked."""
    value = read_json(file)
    version = value.get("version")
    if type(version) is not int or version != REPORT_VERSION:
        raise InputError(
            "a report of another version",
            file=file,
            found=version,
            expected=REPORT_VERSION,
            remedy="measure it anew with --against CHECKPOINT, or convert again",
        )
    try:
        _check(value)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(
            "not a sound report", file=file, found=error, remedy="check the directory with mosaic-verify"
        ) from error
    return value


def _check(value: dict[str, Any]) -> None:
    """ValueError, or what indexing raises, if a report is not what `value` makes of its entries."""
    names = [value["recipe"], *value["dropped"], *value["unlisted_in_source"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("recipe, dropped or unlisted_in_source")
    for entry in value["tensors"]:
        if flaw := _shape_flaw(entry) or entry_flaw(entry):
            raise ValueError(f"entry {entry['name']!r:.200}: {flaw}")
    if value["summary"] != summary(value["tensors"]):
        raise ValueError("a summary that is not that of its tensors")
    for row in value["histograms"]:
        counts = [*row["codes"], *row["scales"].values()]
        sound = len(row["codes"]) == e4m3.MAGNITUDES and all(_whole(count) for count in counts)
        exponents = all(-FLOAT32_RANGE < int(exponent) < FLOAT32_RANGE for exponent in row["scales"])
        if not (_placed(row) and sound and exponents):
            raise ValueError(f"histogram of {row['role']!r:.80}")


def _shape_flaw(entry: dict[str, Any]) -> str | None:
    """What of an entry no table or plot could show."""
    if not isinstance(entry["name"], str) or not isinstance(entry["treatment"], str) or not _placed(entry):
        return "name, treatment, role, part or layer"
    if not all(_whole(size) for size in (*entry["shape"], entry["nbytes"], entry.get("nonfinite_zeroed", 0))):
        return "shape, nbytes or nonfinite_zeroed"
    if not isinstance(entry.get("note", ""), str):
        return "note"
    for key in (*MEASURES, *USE, "amax_noise"):
        number = entry.get(key, 0)
        if not (_finite(number) or (number is None and key in NULLABLE)):
            return key
    return None


def _placed(row: dict[str, Any]) -> bool:
    """Whether role, part and layer are such."""
    layer = row["layer"]
    return (
        row["role"] in [*Role] and row["part"] in [*Part] and (layer is None or (_whole(layer) and layer <= index.MOST))
    )


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def plan_rows(plan: ConversionPlan) -> list[dict[str, Any]]:
    """What a plan does, one row per role, part, source dtype and stored dtype."""
    groups: dict[tuple[str, ...], list[Planned]] = {}
    for planned in plan.tensors:
        spec, source = planned.stored.spec, plan.checkpoint.dtype(planned.piece)
        groups.setdefault((spec.role, spec.part, source, planned.stored.weight.dtype), []).append(planned)
    rows = []
    for key, members in groups.items():
        row: dict[str, Any] = dict(zip(("role", "part", "from", "to"), key, strict=True))
        entries = [entry for member in members for entry in (member.stored.weight, member.stored.scale) if entry]
        rows.append(row | {"tensors": len(members), "nbytes": sum(entry.nbytes for entry in entries)})
    return rows


def plan_notes(plan: ConversionPlan) -> list[str]:
    """Why tensors are not stored as the recipe asks, one line per reason and role."""
    counts = Counter((planned.note, planned.stored.spec.role) for planned in plan.tensors if planned.note)
    return [f"{count} {role}: {note}" for (note, role), count in counts.items()]
