"""report.json: the quantization error of every tensor, and its summary by class. Numbers only, no opinions."""

import json
from collections import Counter
from math import log10, prod
from typing import Any

from mosaic.convert.plan import ConversionPlan, Planned
from mosaic.convert.quantize import ErrorSums
from mosaic.convert.recipe import Treatment
from mosaic.format.layout import Stored

REPORT_FILE = "report.json"
REPORT_VERSION = 1


MEASURES = ("relative_l2", "sqnr_db", "max_abs_error", "zeroed_share", "signal", "noise")
SCALES = ("scale_min", "scale_max")
PASS_THROUGH = "pass-through"


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


def tensor_entry(planned: Planned, sums: ErrorSums) -> dict[str, Any]:
    """One tensor: what it is, how it was treated, and what that cost."""
    treatment = PASS_THROUGH if planned.passes_through else planned.treatment
    entry = contract_entry(planned.stored) | {"treatment": treatment}
    if planned.note:
        entry["note"] = planned.note
    if sums.nonfinite:
        entry["nonfinite_zeroed"] = sums.nonfinite
    if sums.count:
        values = (sums.relative_l2, sums.sqnr_db, sums.max_abs_error, sums.zeroed / sums.count, sums.signal, sums.noise)
        entry |= dict(zip(MEASURES, values, strict=True))
    if planned.stored.scale:
        entry |= dict(zip(SCALES, (sums.scale_min, sums.scale_max), strict=True))
    return entry


def entry_flaw(entry: dict[str, Any]) -> str | None:
    """What is wrong with the part of an entry that only the conversion knew; None if nothing is."""
    treatment = entry.get("treatment")
    if treatment != PASS_THROUGH and treatment not in [*Treatment]:
        return f"treatment {treatment!r}"
    quantized = entry["dtype"] == "F8_E4M3"
    if quantized != (treatment in (Treatment.E4M3, PASS_THROUGH)):
        return f"treatment {treatment!r} for {entry['dtype']}"
    measured = treatment not in (PASS_THROUGH, Treatment.KEEP)
    needed = (MEASURES if measured else ()) + (SCALES if quantized else ())
    if missing := [key for key in needed if not isinstance(entry.get(key, ""), float | int | None)]:
        return f"no usable {', '.join(missing)}"
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
        row["relative_l2"] = (noise / signal) ** 0.5 if signal else 0.0
        row["sqnr_db"] = 10 * log10(signal / noise) if noise and signal else None
        row["max_abs_error"] = max(member["max_abs_error"] for member, _ in measured)
        zeroed = sum(member["zeroed_share"] * size for member, size in measured)
        row["zeroed_share"] = zeroed / sum(size for _, size in measured)
    scaled = [member for member in members if "scale_min" in member]
    if scaled:
        row["scale_min"] = min(member["scale_min"] for member in scaled)
        row["scale_max"] = max(member["scale_max"] for member in scaled)
    return row


def to_bytes(plan: ConversionPlan, entries: list[dict[str, Any]]) -> bytes:
    """The file: one line per tensor, so that it can be read and compared with line tools."""
    head = {
        "version": REPORT_VERSION,
        "recipe": plan.recipe.name,
        "dropped": list(plan.dropped),
        "unlisted_in_source": plan.checkpoint.unlisted,
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append('"summary": [\n' + ",\n".join(json.dumps(row) for row in summary(entries)) + "\n]")
    lines.append('"tensors": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as text."""
    head = ("role", "part", "treatment", "tensors", "weights", "rel. L2", "SQNR dB", "max error", "to zero")
    lines = [head]
    for row in rows:
        measured = "relative_l2" in row
        decibels = row.get("sqnr_db")
        lines.append(
            (
                row["role"],
                row["part"],
                row["treatment"],
                f"{row['tensors']:,}",
                f"{row['weights']:,}",
                f"{row['relative_l2']:.5f}" if measured else "",
                f"{decibels:.2f}" if decibels is not None else "exact",
                f"{row['max_abs_error']:.2e}" if measured else "",
                f"{row['zeroed_share']:.4%}" if measured else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    pads = ["<"] * 3 + [">"] * 6
    return "\n".join(
        "  ".join(f"{cell:{pad}{width}}" for cell, pad, width in zip(line, pads, widths, strict=True)).rstrip()
        for line in lines
    )


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
